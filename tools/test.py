"""Test a detector. Arguments as for mmdet's ``tools/test.py``, and --overwrite."""

from condtok_mm.engine.launch import run_test

if __name__ == '__main__':
    run_test()
