"""Comparisons over seeds: on given values, on logs on disk, and in small real runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from scipy import stats

from condtok_mm.analysis.compare import compare
from condtok_mm.analysis.run_logs import read_run
from condtok_mm.datasets import make_shapes
from condtok_mm.engine.compare_runs import (
    Run,
    Study,
    Variant,
    checkpoint_to_resume,
    lock,
    make_variant,
    plan_runs,
    save_study,
    train_runs,
)

ROOT = Path(__file__).parents[2]
TOOL = ROOT / 'tools/analysis_tools/compare.py'
CONFIG = ROOT / 'configs/demo/mask-rcnn_swin-demo-condtok_fpn_shapes.py'
SHORT = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1']
BROKEN = 'train_dataloader.dataset.ann_file=nowhere.json'


def command(*args):
    return [sys.executable, '-W', 'ignore', *map(str, (TOOL, *args))]


def run(folder, *args, expected=0):
    done = subprocess.run(
        command(*args), cwd=folder, capture_output=True, text=True, check=False
    )
    printed = done.stdout + done.stderr
    assert done.returncode == expected, printed
    assert 'Traceback' not in done.stderr
    return ' '.join(printed.split())


def points(**variants):
    """Mask AP by variant and seed, from 0 on."""
    return {
        name: {seed: {'mask AP': value} for seed, value in enumerate(values)}
        for name, values in variants.items()
    }


def write_log(folder, aps, epochs=1, validate=True):
    """A run of two iterations an epoch, as mmengine logs it."""
    logs = folder / '20260101_000000/vis_data'
    logs.mkdir(parents=True)
    (logs / 'config.py').write_text('train_cfg = dict(max_epochs=2)\n')
    lines = []
    for epoch in range(1, epochs + 1):
        for i in (1, 2):
            step = 2 * epoch - 2 + i
            lines.append(dict(loss=5 / step, time=0.25, epoch=epoch, iter=step))
        if validate:
            share = epoch / epochs / 100
            lines.append(
                {'coco/bbox_mAP': aps * share, 'coco/segm_mAP': aps * share}
                | {'coco/segm_mAP_l': -1.0, 'time': 9.0, 'step': epoch}
            )
    (logs / 'scalars.json').write_text(''.join(f'{json.dumps(x)}\n' for x in lines))


def test_a_missing_seed_is_named_and_nothing_is_concluded():
    result = compare(points(baseline=[44.6, 44.9, 45.2], conditioned=[44.8, 45.4]))
    difference = result.differences['conditioned']['mask AP']
    assert difference.verdict == 'no verdict'
    assert difference.mean is difference.low is difference.high is None
    assert difference.reason == 'conditioned lacks seed 2'
    assert result.notes == [
        'No verdict for conditioned against baseline: conditioned lacks seed 2.'
    ]
    summary = result.summaries['baseline']['mask AP']
    assert summary.mean == pytest.approx(44.9)
    assert summary.std == pytest.approx(0.3)
    unpaired = {'a': {0: {'mask AP': 1.0}}, 'b': {1: {'mask AP': 2.0}}}
    difference = compare(unpaired, seeds=[0, 1, 2]).differences['b']['mask AP']
    assert difference.reason == 'a lacks seeds 1, 2 and b lacks seeds 0, 2'


def test_a_constant_gain_is_seen_through_noise():
    rng = np.random.default_rng(0)
    baseline = 45 + rng.normal(scale=0.3, size=10)
    conditioned = baseline + 0.5 + rng.normal(scale=0.3, size=10)
    result = compare(points(baseline=baseline, conditioned=conditioned))
    difference = result.differences['conditioned']['mask AP']
    expected = stats.ttest_rel(conditioned, baseline).confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx(tuple(expected))
    assert 0 < difference.low < 0.5 < difference.high
    assert difference.verdict == 'higher'
    swapped = compare(points(conditioned=conditioned, baseline=baseline))
    assert swapped.differences['baseline']['mask AP'].verdict == 'lower'


def test_identical_results_tell_nothing():
    values = [44.6, 44.9, 45.2]
    result = compare(points(a=values, b=values), rounding={'mask AP': 0.1})
    difference = result.differences['b']['mask AP']
    assert difference.mean == 0
    assert difference.low < 0 < difference.high
    assert difference.verdict == 'contains zero'
    assert '1 of 1 intervals contain zero' in result.notes[0]


def test_equal_differences_of_rounded_values_do_not_make_a_sure_gain():
    values = points(a=[44.6, 44.9], b=[44.8, 45.1])
    certain = compare(values).differences['b']['mask AP']
    assert certain.verdict == 'higher'
    rounded = compare(values, rounding={'mask AP': 0.1}).differences['b']['mask AP']
    assert rounded.verdict == 'contains zero'
    # t at 97.5 % and one degree of freedom, and the rounding of two values.
    half = 12.706 * np.sqrt(2 * 0.1**2 / 12) / np.sqrt(2)
    assert rounded.high - rounded.mean == pytest.approx(half, rel=1e-4)


def test_one_seed_gives_no_interval():
    difference = compare(points(a=[40.0], b=[41.0])).differences['b']['mask AP']
    assert difference.mean == pytest.approx(1)
    assert difference.reason == 'one seed gives no interval'


def test_the_number_of_comparisons_is_said():
    result = compare(points(a=[1, 2, 3], b=[2, 3, 5], c=[0, 3, 1], d=[5, 5, 6]))
    assert any(
        'The 3 intervals' in note and 'not corrected' in note for note in result.notes
    )


def test_logs_of_an_interrupted_run_are_read_as_one(tmp_path):
    write_log(tmp_path, 20, epochs=2)
    assert read_run(tmp_path).finished
    first = tmp_path / '20260101_000000/vis_data/scalars.json'
    lines = first.read_text().splitlines()
    first.write_text('\n'.join([*lines[:4], lines[4][:9]]))
    log = read_run(tmp_path)
    assert not log.finished
    assert log.end == 'epoch_2'
    assert log.losses == {1: 5, 2: 2.5, 3: 5 / 3}
    resumed = tmp_path / '20260101_000001/vis_data'
    resumed.mkdir(parents=True)
    records = [json.loads(line) for line in lines[3:]]
    records[0]['loss'] = 7.0
    (resumed / 'scalars.json').write_text('\n'.join(map(json.dumps, records)))
    log = read_run(tmp_path)
    assert log.finished
    assert log.losses == {1: 5, 2: 2.5, 3: 7, 4: 5 / 4}
    assert log.curve('mask AP') == pytest.approx({2: 10, 4: 20})
    assert log.values() == pytest.approx(
        {'box AP': 20, 'mask AP': 20, 's / iteration': 0.25}
    )
    first.write_text('no log\n{}\n')
    with pytest.raises(ValueError, match=r'scalars.json, line 1'):
        read_run(tmp_path)


def test_a_run_by_iterations_is_finished_at_the_last_one(tmp_path):
    write_log(tmp_path, 20)
    config = tmp_path / '20260101_000000/vis_data/config.py'
    text = (
        'train_cfg = dict(max_iters={})\ndefault_hooks = dict(logger=dict(interval={}))'
    )
    for iterations, interval, finished in ((2, 1, True), (9, 5, False), (9, 8, True)):
        config.write_text(text.format(iterations, interval))
        log = read_run(tmp_path)
        assert (log.end, log.finished) == (f'iter_{iterations}', finished)


def test_a_run_goes_on_from_where_its_validation_is_not_lost(tmp_path):
    write_log(tmp_path, 20, epochs=2, validate=False)
    assert checkpoint_to_resume(tmp_path) is None
    for name in ('epoch_1.pth', 'epoch_2.pth', 'best_epoch_2.pth'):
        (tmp_path / name).touch()
    marker = tmp_path / 'last_checkpoint'
    marker.write_text('/elsewhere/epoch_1.pth')
    assert checkpoint_to_resume(tmp_path) == tmp_path / 'epoch_1.pth'
    marker.write_text('/elsewhere/epoch_2.pth')
    assert checkpoint_to_resume(tmp_path) == tmp_path / 'epoch_1.pth'
    stopped = Run(Variant('on', 'config.py', ['a=1'], {}), 7, tmp_path)
    words = stopped.command()
    assert words[-3:] == ['--cfg-options', 'a=1', 'randomness.seed=7']
    assert words[words.index('--resume') + 1] == str(tmp_path / 'epoch_1.pth')
    (tmp_path / 'epoch_1.pth').unlink()
    assert checkpoint_to_resume(tmp_path) is None
    assert '--resume' not in stopped.command()


def test_report_on_given_logs(tmp_path):
    for variant, values in (('a', (44.6, 44.9, 45.2)), ('b', (44.8, 45.4))):
        for seed, value in enumerate(values):
            write_log(tmp_path / f'study/{variant}/seed_{seed}', value, epochs=2)
    write_log(tmp_path / 'study/b/seed_2', 46, epochs=1)
    printed = run(tmp_path, '--report', 'study')
    assert 'No verdict for b against a: b lacks seed 2.' in printed
    assert 'b, seed 2 is not finished.' in printed
    assert '44.9 +- 0.3' in printed.replace('0.30', '0.3')
    (folder,) = (tmp_path / 'study/report').iterdir()
    content = json.loads((folder / 'compare.json').read_text())
    assert content['points']['b']['1']['mask AP'] == pytest.approx(45.4)
    assert content['differences']['b']['mask AP']['verdict'] == 'no verdict'
    assert '| mask AP | 44.9 +- 0.3' in (folder / 'compare.md').read_text()
    for name in ('points.png', 'curves.png'):
        assert cv2.imread(str(folder / name)).std() > 0


def test_other_settings_under_the_same_name_are_refused(tmp_path):
    def study(floor, seeds):
        option = f'model.backbone.conditioner.floor={floor}'
        return Study([make_variant('soft', str(CONFIG), [option])], seeds)

    save_study(tmp_path, study(0.1, [0, 1]))
    with pytest.raises(SystemExit, match=r'conditioner.floor was 0.1 and is 0.3 now'):
        save_study(tmp_path, study(0.3, [0]))
    save_study(tmp_path, study(0.1, [2]))
    assert json.loads((tmp_path / 'study.json').read_text())['seeds'] == [0, 1, 2]


def test_all_variants_of_a_seed_come_before_the_next_seed(tmp_path):
    variants = [make_variant(name, str(CONFIG), []) for name in ('a', 'b')]
    runs = plan_runs(tmp_path, Study(variants, [3, 4]))
    assert list(map(str, runs)) == ['a, seed 3', 'b, seed 3', 'a, seed 4', 'b, seed 4']


def test_a_first_run_that_fails_stops_the_others(tmp_path):
    variants = [make_variant(name, str(CONFIG), [BROKEN]) for name in ('bad', 'next')]
    runs = plan_runs(tmp_path, Study(variants, [0]))
    started, ended = [], []
    with lock(tmp_path) as held:
        with pytest.raises(SystemExit, match='is in use'), lock(tmp_path):
            pass
        train_runs(
            runs, 1, held, runs[0], started.append, lambda *args: ended.append(args)
        )
    assert started == runs[:1]
    ((failed, seconds, failure),) = ended
    assert isinstance(failed, Run)
    assert seconds > 0
    assert 'ended with status 1' in failure
    assert 'nowhere.json' in failure


def test_a_run_that_is_just_being_started_is_stopped_too(tmp_path, monkeypatch):
    started = []

    class Sleep(Run):
        def command(self):
            return [sys.executable, '-c', 'import time; time.sleep(60)']

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(*_):
        sys.exit('stopped')

    runs = [Sleep(Variant('a', '', [], {}), seed, tmp_path / 'a') for seed in (0, 1)]
    monkeypatch.setattr(subprocess, 'Popen', Interrupted)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with lock(tmp_path) as held, pytest.raises(SystemExit, match='stopped'):
            train_runs(runs, 1, held, None, lambda *_: None, lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) is stop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_a_restart_repeats_no_finished_run_and_a_failure_stops_no_other(tmp_path):
    make_shapes(tmp_path / 'data/shapes', num_train=8, num_val=4, progress=False)
    floor = 'model.backbone.conditioner.floor'
    off = ['--variant', 'off', CONFIG, 'model.backbone.conditioner=None']
    on = ['--variant', 'on', f'{floor}=0.1']
    rest = ['--seeds', 0, '--work-dir', 'study', '--cfg-options', *SHORT]
    with subprocess.Popen(
        command(*off, *on, *rest), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as study:
        second = tmp_path / 'study/on/seed_0/train.log'
        while not second.is_file() and study.poll() is None:
            time.sleep(0.1)
        study.send_signal(signal.SIGTERM)
        assert 'off, seed 0 finished' in study.communicate()[0]
    assert study.returncode == 1
    first = tmp_path / 'study/off/seed_0'
    before = {path: path.stat().st_mtime_ns for path in first.rglob('*')}
    assert first / 'epoch_1.pth' in before
    bad = ['--variant', 'bad', BROKEN]
    printed = run(tmp_path, *off, *bad, *on, *rest, expected=1)
    assert '1 of 3 runs are finished' in printed
    assert 'off, seed 0 ->' not in printed
    assert {path: path.stat().st_mtime_ns for path in first.rglob('*')} == before
    assert 'bad, seed 0 failed: it ended with status 1' in printed
    assert 'nowhere.json' in printed
    assert 'on, seed 0 finished' in printed
    assert 'lacks seed 0' in printed
    assert f'{floor} = 0.1' in printed
    assert read_run(tmp_path / 'study/on/seed_0').finished
