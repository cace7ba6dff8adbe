"""Train a detector. Arguments as for mmdet's ``tools/train.py``, and --overwrite."""

from condtok_mm.engine.launch import run_train

if __name__ == '__main__':
    run_train()
