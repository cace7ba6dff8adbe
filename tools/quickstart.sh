#!/usr/bin/env bash
# From nothing to a trained and tested detector: set up, make the data, train Mask R-CNN
# with a conditioned Swin, test it, draw its predictions and measure its tokens.
# Running it again goes on where it stopped. Everything is written to work_dirs/quickstart.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
config=configs/demo/mask-rcnn_swin-demo-condtok_fpn_shapes.py
out=work_dirs/quickstart
python=$(bash tools/setup_env.sh)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export PYTHONWARNINGS=ignore

trap 'echo; echo "quickstart: interrupted; the same command goes on."; exit 130' INT
step() { printf '\n== %s\n' "$*"; }

# run LOG COMMAND...: show the lines that tell progress, keep all of them in the log.
run() {
    local log=$out/$1
    shift
    local status=0
    "$@" 2>&1 | tee -a "$log" | {
        grep --line-buffered -E 'Epoch\((train|test)\)|conditioned behind' || true
    } || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 15 "$log"
        echo "quickstart: this step failed; its whole output is in $log."
        exit 1
    fi
}

mkdir -p "$out"
step "1/5 make the data"
"$python" tools/dataset_converters/make_shapes.py data/shapes

step "2/5 train (about four minutes on two cores)"
run train.log "$python" tools/train.py "$config" --work-dir "$out/train" --resume \
    --cfg-options train_cfg.val_begin=100

step "3/5 test, and draw predictions beside the truth"
checkpoint=$(cat "$out/train/last_checkpoint")
run test.log "$python" tools/test.py "$config" "$checkpoint" \
    --work-dir "$out/test" --show-dir predictions

step "4/5 condition number of the tokens"
"$python" tools/analysis_tools/token_conditioning.py "$config" "$checkpoint" \
    --max-images 5 --out-dir "$out/tokens" 2>"$out/tokens.log"

step "5/5 summary"
"$python" tools/misc/summarize_quickstart.py "$out" "$config"
