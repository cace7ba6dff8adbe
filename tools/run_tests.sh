#!/usr/bin/env bash
# Set up what the tests need, then run them.
#
# usage: run_tests.sh [--stack onedl|openmmlab] [PYTEST_ARGUMENT...]
#
# --stack comes first: the distribution of OpenMMLab to run on, as of setup_env.sh.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
stack=()
case "${1:-}" in
    --stack)
        stack=("${@:1:2}")
        shift "${#stack[@]}"
        ;;
    --stack=*)
        stack=(--stack "${1#--stack=}")
        shift
        ;;
esac
python=$(bash "$root/tools/setup_env.sh" "${stack[@]}")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
needed='hypothesis, onnx, onnxruntime, onnxscript, pytest, ruff, safetensors, timm'
if ! "$python" -c "import $needed" 2>/dev/null; then
    # What is installed stays as it is: a newer NumPy would break the stack.
    # shellcheck disable=SC2086  # one name after the other
    "$python" -m pip install -q ${needed//,/} \
        -c <("$python" -m pip list --format=freeze --exclude-editable)
fi
cd "$root"
exec "$python" -m pytest "$@"
