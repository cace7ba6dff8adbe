#!/usr/bin/env bash
# Test on several GPUs, on one machine or more, as dist_train.sh trains.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/misc/torchrun.sh" "$3" test.py "$1" "$2" "${@:4}"
