#!/usr/bin/env bash
# Train with Slurm, on one node or more:
#   GPUS=16 bash tools/slurm_train.sh ...
set -euo pipefail
if [ $# -lt 4 ]; then
    echo "usage: bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/misc/srun.sh" "$1" "$2" train.py "$3" --work-dir "$4" "${@:5}"
