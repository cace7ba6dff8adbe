#!/usr/bin/env bash
# Train on several GPUs, on one machine or more. On each of NNODES machines, with
# NODE_RANK counting from 0:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.1.1.1 PORT=29500 bash tools/dist_train.sh ...
# Without a working directory that all machines share, predictions cannot be gathered in
# it: --cfg-options val_evaluator.collect_device=gpu test_evaluator.collect_device=gpu
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash tools/dist_train.sh CONFIG GPUS [arguments of train.py]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/misc/torchrun.sh" "$2" train.py "$1" "${@:3}"
