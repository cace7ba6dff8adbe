#!/usr/bin/env bash
# Set up what the tests need, then run them. Arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(bash "$root/tools/setup_env.sh")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
needed='hypothesis, onnx, onnxruntime, onnxscript, pytest, ruff, safetensors, timm'
if ! "$python" -c "import $needed" 2>/dev/null; then
    # shellcheck disable=SC2086  # one name after the other
    "$python" -m pip install -q ${needed//,/}
fi
cd "$root"
exec "$python" -m pytest "$@"
