#!/usr/bin/env bash
# Test with Slurm, on one node or more.
#   GPUS=16 bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments]
# GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS are read from the
# environment.
set -euo pipefail
if [ $# -lt 4 ]; then
    echo "usage: bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments]" >&2
    exit 2
fi
partition=$1
job_name=$2
config=$3
checkpoint=$4
shift 4
tools=$(dirname "$0")
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
    python -u "$tools/test.py" "$config" "$checkpoint" --launcher=slurm "$@"
