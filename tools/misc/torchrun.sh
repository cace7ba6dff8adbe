#!/usr/bin/env bash
# Run a tool on GPUS processes of this machine, one of NNODES.
#   bash tools/misc/torchrun.sh GPUS TOOL [arguments of the tool]
set -euo pipefail
tools=$(cd "$(dirname "$0")/.." && pwd)
gpus=$1
tool=$2
shift 2
PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}" exec torchrun \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$gpus" \
    "$tools/$tool" "$@" --launcher pytorch
