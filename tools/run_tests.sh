#!/usr/bin/env bash
# Set up what the tests need, then run them. Arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(bash "$root/tools/setup_env.sh")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if ! "$python" -c 'import pytest, ruff, onnx, onnxruntime, onnxscript, safetensors, timm' \
    2>/dev/null; then
    "$python" -m pip install -q pytest ruff onnx onnxruntime onnxscript safetensors timm
fi
cd "$root"
exec "$python" -m pytest "$@"
