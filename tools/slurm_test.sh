#!/usr/bin/env bash
# Test with Slurm, on one node or more, as slurm_train.sh trains.
set -euo pipefail
if [ $# -lt 4 ]; then
    echo "usage: bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/misc/srun.sh" "$1" "$2" test.py "$3" "$4" "${@:5}"
