"""Test a detector or a classifier by mmdet's or mmpretrain's ``tools/test.py``.

Their arguments, and --overwrite.
"""

from condtok_mm.engine.launch import run_test

if __name__ == '__main__':
    run_test()
