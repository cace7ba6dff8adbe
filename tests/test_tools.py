"""The tools, in processes of their own, on a small set of shapes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import onnx
import pytest
import torch

from condtok_mm._stack import release
from condtok_mm.datasets import make_shapes

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / 'configs/demo/mask-rcnn_swin-demo-condtok_fpn_shapes.py'
SHORT = [
    '--cfg-options',
    'default_hooks.logger.interval=1',
    'train_cfg.max_epochs=1',
    'train_cfg.val_interval=1',
    'train_dataloader.num_workers=0',
    'train_dataloader.persistent_workers=False',
    'val_dataloader.num_workers=0',
    'val_dataloader.persistent_workers=False',
    'test_dataloader.num_workers=0',
    'test_dataloader.persistent_workers=False',
]


def run(folder, tool, *args, expected=0):
    """Run a tool of this project in a folder, and return what it printed."""
    command = [sys.executable, '-W', 'ignore', ROOT / 'tools' / tool, *args]
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with the set of shapes and a detector that saw eight of them."""
    folder = tmp_path_factory.mktemp('run')
    make_shapes(folder / 'data/shapes', num_train=8, num_val=4, progress=False)
    folder.joinpath('train.txt').write_text(
        run(folder, 'train.py', CONFIG, '--work-dir', 'work', *SHORT)
    )
    return folder


def records(folder):
    (path,) = folder.glob('work/2*/vis_data/scalars.json')
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_train_logs_losses_metrics_and_where_the_conditioner_sits(trained):
    log = (trained / 'train.txt').read_text()
    assert 'conditioned behind patch_embed (kappa=2, floor=0.1, solver=auto' in log
    losses = [r['loss'] for r in records(trained) if 'loss' in r]
    assert len(losses) == iterations(log)
    assert all(0 < loss < 100 for loss in losses)
    assert 'coco/segm_mAP_50' in records(trained)[-1]


def test_checkpoint_has_the_stock_keys(trained):
    from mmdet.registry import MODELS
    from mmengine.config import Config

    path = Path((trained / 'work/last_checkpoint').read_text())
    state = torch.load(path, weights_only=False)['state_dict']
    twin = CONFIG.with_name(CONFIG.name.replace('-condtok', ''))
    MODELS.build(Config.fromfile(twin).model).load_state_dict(state, strict=True)


def test_a_finished_run_is_not_overwritten_unasked(trained):
    before = (trained / 'work/epoch_1.pth').stat().st_mtime_ns
    out = run(trained, 'train.py', CONFIG, '--work-di', 'work', *SHORT, expected=1)
    assert 'work holds a run already (epoch_1.pth)' in out
    assert '--resume' in out
    assert (trained / 'work/epoch_1.pth').stat().st_mtime_ns == before


def test_resume_goes_on(trained, tmp_path):
    log = (trained / 'train.txt').read_text()
    shutil.copytree(trained / 'work', tmp_path / 'work')
    (tmp_path / 'work/last_checkpoint').write_text(str(tmp_path / 'work/epoch_1.pth'))
    (tmp_path / 'data').symlink_to(trained / 'data')
    options = [word.replace('max_epochs=1', 'max_epochs=2') for word in SHORT]
    out = run(tmp_path, 'train.py', CONFIG, '--work-dir', 'work', '--resume', *options)
    assert f'Epoch(train) [2][{iterations(log)}/' in out
    assert 'Epoch(train) [1]' not in out
    assert (tmp_path / 'work/epoch_2.pth').is_file()


def test_resume_from_half_a_checkpoint_ends_as_if_uninterrupted(trained, tmp_path):
    """A baseline that imports nothing of ours and has no seed."""
    (tmp_path / 'data').symlink_to(trained / 'data')
    twin = CONFIG.with_name(CONFIG.name.replace('-condtok', ''))
    options = [word.replace('max_epochs=1', 'max_epochs=2') for word in SHORT]
    run(tmp_path, 'train.py', twin, '--work-dir', 'whole', *options)
    shutil.copytree(tmp_path / 'whole', tmp_path / 'killed')
    second = tmp_path / 'killed/epoch_2.pth'
    os.truncate(second, second.stat().st_size // 2)
    (tmp_path / 'killed/last_checkpoint').write_text(str(second))
    out = run(tmp_path, 'train.py', twin, '--work-dir', 'killed', '--resume', *options)
    assert 'not a whole checkpoint; going on from killed/epoch_1.pth' in out
    assert 'Epoch(train) [2]' in out
    assert 'Epoch(train) [1]' not in out
    states = [
        torch.load(tmp_path / name / 'epoch_2.pth', weights_only=False)['state_dict']
        for name in ('whole', 'killed')
    ]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def metrics(folder):
    (path,) = folder.glob('2*/2*.json')
    return json.loads(path.read_text())


def test_test_draws_pictures_and_can_turn_the_conditioner_off(trained):
    checkpoint = trained / 'work/epoch_1.pth'
    run(
        trained,
        'test.py',
        CONFIG,
        checkpoint,
        '--work-dir',
        'on',
        '--show-dir',
        'pictures',
        '--out',
        'on.pkl',
        *SHORT,
    )
    pictures = list(trained.glob('on/2*/pictures/*.png'))
    assert len(pictures) == 4
    for path in pictures:
        height, width, _ = cv2.imread(
            str(trained / 'data/shapes/val' / path.name)
        ).shape
        assert cv2.imread(str(path)).shape == (height, 2 * width, 3)
    off = [*SHORT, 'model.backbone.conditioner=None']
    out = run(
        trained,
        'test.py',
        CONFIG,
        checkpoint,
        '--work-dir',
        'off',
        '--out',
        'off.pkl',
        *off,
    )
    assert 'no conditioner, stock tokens' in out
    assert metrics(trained / 'on').keys() == metrics(trained / 'off').keys()
    assert (trained / 'on.pkl').read_bytes() != (trained / 'off.pkl').read_bytes()
    for words in (
        ['--ou', 'on.pkl'],
        ['--cfg-options', 'test_evaluator.outfile_prefix=on'],
    ):
        out = run(trained, 'test.py', CONFIG, checkpoint, *words, expected=1)
        assert 'on.pkl exists already' in out


def test_unreadable_images_are_named_and_left_out(trained, tmp_path):
    (tmp_path / 'empty.png').touch()
    (tmp_path / 'text.png').write_text('not an image')
    shutil.copy(trained / 'data/shapes/val/000001.png', tmp_path / 'good.png')
    tool = 'analysis_tools/token_conditioning.py'
    out = run(trained, tool, CONFIG, '--images', tmp_path, '--out-dir', 'mixed')
    for name in ('empty.png', 'text.png'):
        assert f'left out: {tmp_path / name} cannot be read' in out
    (path,) = (trained / 'mixed').glob('*/tokens.json')
    assert [r['name'] for r in json.loads(path.read_text())] == ['good.png']


@pytest.mark.parametrize(
    ('tool', 'args', 'words'),
    [
        ('train.py', ['missing.py'], 'config missing.py does not exist'),
        ('test.py', [CONFIG, 'missing.pth'], 'checkpoint missing.pth does not exist'),
    ],
)
def test_missing_files_are_named_at_once(trained, tool, args, words):
    out = run(trained, tool, *args, expected=1)
    assert words in out
    assert 'Traceback' not in out


def test_training_says_what_it_trains_on(trained):
    log = (trained / 'train.txt').read_text()
    line = (
        'train_dataloader.dataset: data/shapes/annotations/instances_train.json: 8 im'
    )
    assert log.count(line) == 1
    assert 'are trained on' in log


def test_check_dataset_tells_by_its_exit_code(trained):
    tool = 'misc/check_dataset.py'
    printed = run(trained, tool, CONFIG, '--decode')
    assert "2 -> 1 'square'" in printed
    assert '0 kinds of errors' in printed
    names = "classes=('disc','sqare','triangle','star','cross')"
    options = ['--cfg-options', f'train_dataloader.dataset.metainfo.{names}']
    printed = run(trained, tool, CONFIG, *options, expected=1)
    assert "'sqare' (the file has" in printed
    assert '2 kinds of errors' in printed
    printed = run(trained, 'train.py', CONFIG, '--work-dir', 'no', *options, expected=1)
    assert "'sqare' (the file has" in printed
    assert 'train all the same by --no-check-dataset' in printed
    assert not (trained / 'no').exists()
    pretrain = ROOT / 'configs/pretrain/vit-demo_1xb8_shapes.py'
    assert 'config of a classifier' in run(trained, tool, pretrain, expected=1)


def test_a_missing_data_set_is_named_with_what_makes_it(tmp_path):
    printed = run(tmp_path, 'train.py', CONFIG, expected=1)
    path = 'data/shapes/annotations/instances_train.json'
    assert f'annotation file {path} does not exist; train_dataloader.dataset' in printed
    assert 'python tools/dataset_converters/make_shapes.py data/shapes' in printed
    assert 'Traceback' not in printed
    assert not list(tmp_path.iterdir())
    printed = run(tmp_path, 'train.py', CONFIG, '--no-check-dataset', expected=1)
    assert f"No such file or directory: '{path}'" in printed


def test_token_conditioning(trained):
    out = run(
        trained,
        'analysis_tools/token_conditioning.py',
        CONFIG,
        trained / 'work/epoch_1.pth',
        '--max-images',
        '2',
        '--out-dir',
        'tokens',
    )
    assert 'kappa(X+C)' in out
    (folder,) = (trained / 'tokens').iterdir()
    reports = json.loads((folder / 'tokens.json').read_text())
    assert len(reports) == 2
    for report in reports:
        assert report['kappa_after'] < report['kappa_before']
        assert report['kappa_above_floor'] <= 2 / (0.1 + 0.5**0.5)
    assert cv2.imread(str(folder / 'singular_values.png')).shape[2] == 3
    twin = CONFIG.with_name(CONFIG.name.replace('-condtok', ''))
    out = run(trained, 'analysis_tools/token_conditioning.py', twin, expected=1)
    assert 'SwinTransformer has no conditioner attached' in out


@pytest.mark.parametrize(
    'script', ['dist_train.sh', 'dist_test.sh', 'slurm_train.sh', 'slurm_test.sh']
)
def test_launchers_explain_their_arguments(script):
    done = subprocess.run(
        ['bash', ROOT / 'tools' / script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert 'usage: ' in done.stderr
    assert script in done.stderr


def test_two_processes_train_through_dist_train(trained, tmp_path):
    (tmp_path / 'data').symlink_to(trained / 'data')
    done = subprocess.run(
        [
            'bash',
            ROOT / 'tools/dist_train.sh',
            CONFIG,
            '2',
            '--work-dir',
            'work',
            *SHORT,
        ]
        + ['model_wrapper_cfg.device_ids=None'],
        cwd=tmp_path,
        env=environment(PORT='29511', OMP_NUM_THREADS='1'),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / 'work/epoch_1.pth').is_file()
    assert done.stdout.count('images are trained on') == 1
    alone = iterations((trained / 'train.txt').read_text())
    assert iterations(done.stdout + done.stderr) == -(-alone // 2)


def iterations(log):
    return int(re.search(r'Epoch\(train\) \[1\]\[\d+/(\d+)\]', log).group(1))


def environment(**extra):
    path = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
    return os.environ | dict(PATH=path) | extra


def test_export_onnx(trained, tmp_path):
    out = tmp_path / 'detector.onnx'
    checkpoint = trained / 'work/epoch_1.pth'
    args = ('deployment/export_onnx.py', CONFIG, checkpoint, '--out', out)
    if release(torch.__version__) < (2, 5):
        assert 'exporting needs torch 2.5 or newer' in run(tmp_path, *args, expected=1)
        return
    printed = run(tmp_path, *args)
    assert 'Not in it: normalisation, RPN, heads' in printed
    differences = [float(x) for x in re.findall(r'x \d+ +│ +(\S+e-\d+)', printed)]
    assert len(differences) == 4
    assert max(differences) < 1e-3
    operators = {node.op_type for node in onnx.load(out).graph.node}
    assert 'MatMul' in operators
    assert not [name for name in operators if 'Svd' in name or 'Eig' in name]
    assert 'exists already' in run(tmp_path, *args, expected=1)


def test_benchmark(trained):
    printed = run(
        trained,
        'analysis_tools/benchmark.py',
        CONFIG,
        *('--size', 64, 96, '--rounds', 2, '--out-dir', 'bench'),
    )
    (folder,) = (trained / 'bench').iterdir()
    report = json.loads((folder / 'benchmark.json').read_text())
    rows = {(row['mode'], row['variant']): row for row in report['rows']}
    variants = ('stock', 'off', 'conditioned')
    assert list(rows) == [(m, v) for m in ('train', 'inference') for v in variants]
    for (mode, variant), row in rows.items():
        assert row['peak_mib'] > 0
        assert row['images_per_second'] == pytest.approx(1 / row['seconds'])
        assert (row['conditioning_share'] > 0) == (variant == 'conditioned')
        base = rows[mode, 'stock']['seconds']
        assert row['time_ratio'] == pytest.approx(row['seconds'] / base)
    assert 'inference: conditioned' in printed
    assert '| train: stock |' in (folder / 'benchmark.md').read_text()
    assert cv2.imread(str(folder / 'benchmark.png')) is not None


def test_benchmark_scaling(trained):
    tool = 'analysis_tools/benchmark.py'
    run(trained, tool, CONFIG, '--scaling', '--rounds', 1, '--out-dir', 'scaling')
    (folder,) = (trained / 'scaling').iterdir()
    report = json.loads((folder / 'benchmark.json').read_text())
    assert list(report['scaling']) == ['tokens N', 'batch', 'channels D']
    for sweep in report['scaling'].values():
        assert len(sweep['seconds']) == 5
        assert sweep['slope'] > 0
        assert sweep['r2'] <= 1


def test_calibrate_conditioner(trained):
    tool = 'model_converters/calibrate_conditioner.py'
    args = (tool, CONFIG, 'work/epoch_1.pth', '--out', 'fixed.pth')
    printed = run(trained, *args, '--eval', *SHORT)
    report = json.loads((trained / 'fixed.json').read_text())
    assert len(report['images']) == 4
    for row in report['images']:
        assert row['kappa_per_image'] < row['kappa']
        assert len(row['feature_difference']) == 4
        assert 0 < max(row['feature_difference']) < 1
    assert set(report['metrics']) == {'per image', 'calibrated'}
    assert 'coco/segm_mAP_50' in report['metrics']['calibrated']
    assert 'one P for all images' in printed
    state = torch.load(trained / 'fixed.pth', weights_only=False)['state_dict']
    assert 'backbone.conditioner.preconditioner' in state
    run(trained, 'test.py', CONFIG, 'fixed.pth', '--work-dir', 'fixed', *SHORT)
    assert 'exists already' in run(trained, *args, expected=1)
    folded = (*args[:-1], 'folded.pth', '--fold')
    assert 'more than one convolution' in run(trained, *folded, expected=1)
    assert not (trained / 'folded.pth').exists()


def test_stress_detector(tmp_path):
    few = ['--count', 6, '--max-size', 90, '--seed', 3]
    printed = run(tmp_path, 'misc/stress_detector.py', CONFIG, *few)
    assert re.search(r'[6-9] images in \d batches, 0 of them failed', printed)
    nan = ['--cfg-options', 'model.data_preprocessor.mean=[nan,nan,nan]']
    printed = run(tmp_path, 'misc/stress_detector.py', CONFIG, *few, *nan, expected=1)
    failures = [line for line in printed.splitlines() if 'again:' in line]
    assert len(failures) > 1
    assert failures[-1].startswith('FloatingPointError: features that hold inf or nan')
    again = failures[-1].partition('again: ')[2].split()
    printed = run(tmp_path, 'misc/stress_detector.py', CONFIG, *again, *nan, expected=1)
    assert failures[-1] in printed
    assert 'in 1 batches, 1 of them failed' in printed


def test_convert_checkpoint(trained):
    tool = 'model_converters/convert_checkpoint.py'
    detector = torch.load(trained / 'work/epoch_1.pth', weights_only=False)[
        'state_dict'
    ]
    averaged = {f'module.{key}': value for key, value in detector.items()}
    torch.save(dict(model_ema=averaged), trained / 'averaged.pth')
    args = (tool, CONFIG, 'averaged.pth', '--out', 'converted/swin.pth')
    printed = run(trained, *args)
    assert 'OpenMMLab, under model_ema.module.backbone' in printed
    state = torch.load(trained / 'converted/swin.pth')['state_dict']
    for key, value in state.items():
        assert torch.equal(value, detector[f'backbone.{key}'])
    assert 'exists already' in run(trained, *args, expected=1)
    options = [
        'model.backbone.init_cfg.type=Pretrained',
        'model.backbone.init_cfg.checkpoint=converted/swin.pth',
    ]
    printed = run(trained, 'train.py', CONFIG, '--work-dir', 'tuned', *SHORT, *options)
    learnt = [key for key in state if not key.endswith('relative_position_index')]
    assert f'{len(learnt)} of {len(learnt)}' in printed
    printed = run(trained, *args[:-1], 'b.pth', '--prefix', 'neck', expected=1)
    assert 'cannot be converted: the checkpoint has no keys with the prefix' in printed


def test_no_tool_runs_what_a_checkpoint_holds(trained):
    class Payload:
        def __reduce__(self):
            return os.system, (f'touch {trained}/ran',)

    content = torch.load(trained / 'work/epoch_1.pth', weights_only=False)
    torch.save(content | dict(hidden=Payload()), trained / 'hostile.pth')
    hostile = trained / 'hostile.pth'
    init_cfg = [
        'model.backbone.init_cfg.type=Pretrained',
        f'model.backbone.init_cfg.checkpoint={hostile}',
    ]
    work = ['--work-dir', 'hostile']
    for command in (
        ('test.py', CONFIG, hostile, *work),
        ('train.py', CONFIG, *work, '--resume', hostile),
        ('train.py', CONFIG, *work, *SHORT, f'load_from={hostile}'),
        ('train.py', CONFIG, *work, *SHORT, *init_cfg),
        ('model_converters/convert_checkpoint.py', CONFIG, hostile, '--out', 'c.pth'),
        (
            'model_converters/calibrate_conditioner.py',
            CONFIG,
            hostile,
            '--out',
            'c.pth',
        ),
        ('deployment/export_onnx.py', CONFIG, hostile, '--out', 'c.onnx'),
        ('analysis_tools/token_conditioning.py', CONFIG, hostile),
    ):
        printed = run(trained, *command, expected=1)
        assert 'needs posix.system; reading it could execute' in printed
    assert not (trained / 'ran').exists()


@pytest.mark.parametrize(
    ('tool', 'args', 'words'),
    [
        ('analysis_tools/benchmark.py', ['--size', '0', '64'], '--size is too small'),
        (
            'model_converters/convert_checkpoint.py',
            ['junk.pth', '--out', 'fixed.pth'],
            'junk.pth cannot be read as a checkpoint',
        ),
        ('analysis_tools/benchmark.py', ['--warmup', '-1'], '--warmup is too small'),
        (
            'misc/stress_detector.py',
            ['--max-size', '0'],
            '--max-size must be at least 1, but got 0',
        ),
        ('analysis_tools/benchmark.py', ['--device', 'foo'], 'on foo: '),
        (
            'analysis_tools/benchmark.py',
            ['--cfg-options', 'model.backbone.conditioner.kappa=0.5'],
            'kappa must lie in (1, inf), but got 0.5',
        ),
        (
            'model_converters/calibrate_conditioner.py',
            ['junk.pth', '--out', 'fixed.json'],
            'must end in .pth',
        ),
        (
            'model_converters/calibrate_conditioner.py',
            ['junk.pth', '--out', 'fixed.pth'],
            'checkpoint junk.pth cannot be used on cpu',
        ),
        (
            'deployment/export_onnx.py',
            ['junk.pth', '--out', 'model.onnx'],
            'checkpoint junk.pth cannot be used on cpu',
        ),
    ],
)
def test_bad_arguments_are_named_and_leave_nothing(tmp_path, tool, args, words):
    (tmp_path / 'junk.pth').write_text('junk')
    printed = run(tmp_path, tool, CONFIG, *args, expected=1)
    assert words in printed
    assert 'Traceback' not in printed
    assert [path.name for path in tmp_path.iterdir()] == ['junk.pth']
