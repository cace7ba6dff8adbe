"""Train a detector or a classifier by mmdet's or mmpretrain's ``tools/train.py``.

Their arguments, --overwrite and --no-check-dataset.
"""

from condtok_mm.engine.launch import run_train

if __name__ == '__main__':
    run_train()
