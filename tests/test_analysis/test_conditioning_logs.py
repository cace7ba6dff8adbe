import json
import runpy
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from condtok_mm.analysis.conditioning_logs import plot_conditioning, read_conditioning

TOOL = Path(__file__).parents[2] / 'tools/analysis_tools/plot_conditioning.py'


def write_log(folder, start, kappas, conditioned=True, prefix=''):
    """A log as mmengine writes it; the first line comes before a measurement."""
    lines = [{f'{prefix}loss': 1.0, 'iter': start - 10, 'step': start - 10}]
    for place, kappa in enumerate(kappas):
        iteration = start + 10 * place
        line = {'loss': 1.0, 'token_kappa': kappa, 'token_rank': 49.0}
        if conditioned:
            line |= {'token_kappa_conditioned': kappa / 3, 'token_norm_growth': 3.1}
        line = {prefix + name: value for name, value in line.items()}
        lines.append(line | {'iter': iteration, 'step': iteration})
    lines.append({'coco/bbox_mAP': 0.4, 'step': 1})
    path = folder / 'vis_data/scalars.json'
    path.parent.mkdir(parents=True)
    path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return path


def run_tool(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', [str(TOOL), *args])
    runpy.run_path(str(TOOL), run_name='__main__')


@pytest.mark.parametrize('prefix', ['', 'train/'])
def test_every_way_to_name_a_run(tmp_path, prefix):
    log = write_log(tmp_path / '20250101_000000', 20, [5.0, 4.0], prefix=prefix)
    for run in (tmp_path, tmp_path / '20250101_000000', log, str(log)):
        assert read_conditioning(run) == {
            'token_kappa': {20: 5.0, 30: 4.0},
            'token_kappa_conditioned': {20: 5.0 / 3, 30: 4.0 / 3},
            'token_rank': {20: 49.0, 30: 49.0},
            'token_norm_growth': {20: 3.1, 30: 3.1},
        }


def test_resumed_run_is_joined_and_a_new_one_replaces(tmp_path):
    write_log(tmp_path / '20250101_000000', 20, [9.0, 8.0, 7.0, 6.0])
    write_log(tmp_path / '20250101_120000', 50, [5.0, 4.0])
    kappas = read_conditioning(tmp_path)['token_kappa']
    assert list(kappas.items()) == [(20, 9.0), (30, 8.0), (50, 5.0), (60, 4.0)]
    write_log(tmp_path / '20250102_000000', 20, [3.0], conditioned=False)
    assert read_conditioning(tmp_path) == {
        'token_kappa': {20: 3.0},
        'token_rank': {20: 49.0},
    }


def test_half_a_line_at_the_end_of_a_killed_run_is_left_out(tmp_path):
    log = write_log(tmp_path, 20, [5.0, 4.0])
    whole = read_conditioning(log)
    log.write_text(log.read_text() + '{"loss": 1.0, "token_ka')
    assert read_conditioning(log) == whole


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere does not exist'):
        read_conditioning(tmp_path / 'nowhere')
    with pytest.raises(FileNotFoundError, match=r'holds no \*/vis_data/scalars.json'):
        read_conditioning(tmp_path)
    log = write_log(tmp_path / '20250101_000000', 20, [])
    words = r"no condition numbers.*custom_hooks = \[dict\(type='ConditionNumberHook'"
    with pytest.raises(ValueError, match=words):
        read_conditioning(tmp_path)
    for text in ('{"loss": 1.0, "it', '[1]', '\x00'):
        log.write_text(f'{{"loss": 1.0, "iter": 10}}\n{text}\n{{}}\n')
        with pytest.raises(ValueError, match=r'line 2 of .*scalars.json is not one'):
            read_conditioning(tmp_path)


@pytest.mark.parametrize(('conditioned', 'height'), [(False, 420), (True, 840)])
def test_picture_has_a_line_for_each_run(tmp_path, conditioned, height):
    write_log(tmp_path / 'a/20250101_000000', 20, [5e3, 4e3], conditioned=False)
    write_log(tmp_path / 'b/20250101_000000', 20, [3e3, 2e3], conditioned=conditioned)
    pictures = []
    for names in ('a', 'ab'):
        runs = {name: read_conditioning(tmp_path / name) for name in names}
        plot_conditioning(runs, tmp_path / 'picture.png')
        pictures.append(cv2.imread(str(tmp_path / 'picture.png')))
    assert pictures[1].shape == (height, 1200, 3)
    # Matplotlib's first two colours, in BGR.
    for color, seen in (((180, 119, 31), [1, 1]), ((14, 127, 255), [0, 1])):
        found = [int((picture == np.array(color)).all(2).any()) for picture in pictures]
        assert found == seen


def test_tool_draws_and_stops_with_a_sentence(tmp_path, monkeypatch, capsys):
    write_log(tmp_path / 'base/20250101_000000', 20, [5e3, 4e3], conditioned=False)
    write_log(tmp_path / 'mine/20250101_000000', 20, [3e3, 2e3])
    monkeypatch.chdir(tmp_path)
    run_tool(monkeypatch, 'base', 'mine', '--out', 'plots/kappa.png')
    assert capsys.readouterr().out == 'written: plots/kappa.png\n'
    assert cv2.imread('plots/kappa.png').shape == (840, 1200, 3)
    with pytest.raises(SystemExit, match=r'^yours does not exist; give the work dir'):
        run_tool(monkeypatch, 'base', 'yours')
    assert not Path('conditioning.png').exists()
    with pytest.raises(SystemExit, match=r'^--out must end in .png, but got kappa'):
        run_tool(monkeypatch, 'base', '--out', 'kappa.jpg')
