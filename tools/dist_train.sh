#!/usr/bin/env bash
# Train on several GPUs, on one machine or more.
#   bash tools/dist_train.sh CONFIG GPUS [arguments of train.py]
# On each of NNODES machines, with NODE_RANK counting from 0:
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.1.1.1 PORT=29500 bash tools/dist_train.sh ...
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash tools/dist_train.sh CONFIG GPUS [arguments of train.py]" >&2
    exit 2
fi
config=$1
gpus=$2
shift 2
tools=$(dirname "$0")
PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}" exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$gpus" \
    "$tools/train.py" "$config" --launcher pytorch "$@"
