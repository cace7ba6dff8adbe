#!/usr/bin/env bash
# Run a tool with Slurm. GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS are
# read from the environment.
#   bash tools/misc/srun.sh PARTITION JOB_NAME TOOL [arguments of the tool]
set -euo pipefail
tools=$(cd "$(dirname "$0")/.." && pwd)
partition=$1
job_name=$2
tool=$3
shift 3
# shellcheck disable=SC2086
PYTHONPATH="$tools/..${PYTHONPATH:+:$PYTHONPATH}" exec srun \
    --partition="$partition" \
    --job-name="$job_name" \
    --gres="gpu:${GPUS_PER_NODE:-8}" \
    --ntasks="${GPUS:-8}" \
    --ntasks-per-node="${GPUS_PER_NODE:-8}" \
    --cpus-per-task="${CPUS_PER_TASK:-5}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    python -u "$tools/$tool" "$@" --launcher slurm
