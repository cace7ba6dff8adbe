import json
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from mmcv.transforms import Compose, LoadImageFromFile
from mmdet.datasets.transforms import PackDetInputs
from mmdet.models import DetDataPreprocessor

from condtok_mm.analysis.kappa_tradeoff import (
    Tradeoff,
    average,
    embed_disturbed,
    measure_setting,
)
from condtok_mm.conditioning import TokenConditioner
from condtok_mm.models import CondTokSwinTransformer, CondTokViT

from ..conftest import MEAN, STD, photograph, randomise, reference
from ..test_tools import CONFIG, run

PIPELINE = Compose([LoadImageFromFile(), PackDetInputs(meta_keys=('img_shape',))])
SETTINGS = [(2.0, 0.0), (2.0, 0.1), (5.0, 0.0), (5.0, 0.1), (21.0, 0.3)]


def picture(path, height=72, width=88):
    """Write a photograph, and return its pixels (H, W, 3), BGR."""
    rgb = photograph(height, width).permute(1, 2, 0).numpy() * STD + MEAN
    pixels = np.ascontiguousarray(rgb.round().astype(np.uint8)[..., ::-1])
    cv2.imwrite(str(path), pixels)
    return pixels


def detector(kind='vit', padding=0, **conditioner):
    """What a detector has before its neck: a preprocessor and a backbone."""
    if kind == 'vit':
        arch = dict(embed_dims=24, num_layers=1, num_heads=1)
        cls, args = CondTokViT, dict(arch=arch, img_size=64, patch_size=8)
    else:
        args = dict(embed_dims=32, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8))
        cls = CondTokSwinTransformer
    backbone = randomise(cls(conditioner=conditioner, **args)).eval()
    preprocessor = DetDataPreprocessor(
        MEAN, STD, pad_size_divisor=32, pad_value=padding, bgr_to_rgb=True
    )
    return SimpleNamespace(backbone=backbone, data_preprocessor=preprocessor)


def embed(backbone, pixels):
    """Tokens (N, D) by NumPy in float64; patches do not overlap."""
    layer = backbone.patch_embed
    weight = layer.projection.weight.detach().double().numpy()
    side = weight.shape[-1]
    image = (pixels[..., ::-1] - np.array(MEAN)) / STD
    height, width = (size // side for size in pixels.shape[:2])
    patches = image.reshape(height, side, width, side, 3).transpose(0, 2, 4, 1, 3)
    tokens = patches.reshape(height * width, -1) @ weight.reshape(len(weight), -1).T
    tokens += layer.projection.bias.detach().numpy()
    if getattr(layer, 'norm', None) is not None:
        tokens -= tokens.mean(1, keepdims=True)
        tokens /= np.sqrt(tokens.var(1, keepdims=True) + layer.norm.eps)
        tokens *= layer.norm.weight.detach().numpy()
        tokens += layer.norm.bias.detach().numpy()
    return tokens


def disturb(pixels):
    noise = np.random.default_rng(0).normal(size=pixels.shape)
    _, buffer = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 90])
    height, width, _ = pixels.shape
    smaller = cv2.resize(pixels, (round(0.95 * width), round(0.95 * height)))
    return dict(
        noise=np.clip(np.rint(pixels + noise), 0, 255).astype(np.uint8),
        jpeg=cv2.imdecode(buffer, cv2.IMREAD_COLOR),
        resize=cv2.resize(smaller, (width, height)),
    )


@pytest.mark.parametrize('kind', ['vit', 'swin'])
def test_measurements_are_those_of_numpy(tmp_path, kind):
    pixels = picture(tmp_path / 'photograph.png')
    model = detector(kind)
    embedded = embed_disturbed(model, PIPELINE, tmp_path / 'photograph.png')
    X = embed(model.backbone, pixels)
    before = np.linalg.svd(X, compute_uv=False)
    rank = (before > 4.8e-7 * before[0]).sum()
    disturbed = {
        name: embed(model.backbone, changed)
        for name, changed in disturb(pixels).items()
    }
    for kappa, floor in [(None, None), *SETTINGS]:
        conditioner = kappa and TokenConditioner(kappa, floor=floor)
        report = measure_setting(embedded, conditioner)

        def condition(tokens, kappa=kappa, floor=floor):
            return reference(tokens, kappa, floor) if kappa else tokens

        expected = condition(X)
        after = np.linalg.svd(expected, compute_uv=False)
        above = (before[:rank] >= (floor or 0) * before[0]).sum()
        assert (report.kappa, report.floor) == (kappa, floor)
        assert report.directions == above
        assert report.kappa_reached == pytest.approx(after[0] / after[rank - 1], 1e-3)
        top = after[0] / after[above - 1]
        assert report.kappa_above_floor == pytest.approx(top, 1e-3)
        growth = np.linalg.norm(after) / np.linalg.norm(before)
        assert report.growth == pytest.approx(growth, 1e-4)
        assert list(report.sensitivity) == ['noise', 'jpeg', 'resize', 'padding']
        for name, tokens in disturbed.items():
            change = np.linalg.norm(condition(tokens) - expected)
            relative = change / np.linalg.norm(expected)
            assert report.sensitivity[name] == pytest.approx(relative, 2e-3), name
            assert relative > 1e-3
        assert report.sensitivity['padding'] < 1e-5


@pytest.mark.parametrize('kind', ['vit', 'swin'])
def test_a_larger_kappa_or_floor_is_less_sensitive(tmp_path, kind):
    picture(tmp_path / 'photograph.png')
    embedded = embed_disturbed(detector(kind), PIPELINE, tmp_path / 'photograph.png')
    raw = measure_setting(embedded, None).sensitivity['noise']
    changes = np.array(
        [
            [
                measure_setting(
                    embedded, TokenConditioner(kappa, floor=floor)
                ).sensitivity['noise']
                for floor in (0, 0.03, 0.1, 0.3)
            ]
            for kappa in (2, 5, 21)
        ]
    )
    assert (np.diff(changes, axis=0) < 0).all()
    assert (np.diff(changes, axis=1) < 0).all()
    assert changes.min() > raw


def test_padding_that_is_taken_for_image_is_named(tmp_path):
    picture(tmp_path / 'photograph.png')
    with pytest.raises(ValueError, match=r'has 144 tokens alone and 192 in a larger'):
        embed_disturbed(detector(padding=1), PIPELINE, tmp_path / 'photograph.png')


def test_padding_is_left_out_where_every_token_counts(tmp_path):
    picture(tmp_path / 'photograph.png')
    model = detector(pad_value=None)
    embedded = embed_disturbed(model, PIPELINE, tmp_path / 'photograph.png')
    report = measure_setting(embedded, TokenConditioner())
    assert list(report.sensitivity) == ['noise', 'jpeg', 'resize']


def test_average():
    reports = [
        Tradeoff(2.0, 0.1, 3, 1.0, 10.0, 2.0, dict(noise=0.1)),
        Tradeoff(2.0, 0.1, 4, 4.0, 1000.0, 3.0, dict(noise=0.3)),
    ]
    mean = average(reports)
    assert (mean.kappa, mean.floor, mean.directions) == (2.0, 0.1, 3.5)
    assert mean.kappa_above_floor == pytest.approx(2)
    assert mean.kappa_reached == pytest.approx(100)
    assert mean.growth == pytest.approx(2.5)
    assert mean.sensitivity == dict(noise=pytest.approx(0.2))


def test_tool(tmp_path):
    (tmp_path / 'images').mkdir()
    picture(tmp_path / 'images/photograph.png')
    (tmp_path / 'images/broken.png').touch()
    words = ('--images', 'images', '--kappa', 2, 21, '--floor', 0, 0.1)
    printed = run(tmp_path, 'analysis_tools/kappa_tradeoff.py', CONFIG, *words)
    assert 'left out: images/broken.png cannot be read' in printed
    (folder,) = (tmp_path / 'work_dirs/kappa_tradeoff').iterdir()
    report = json.loads((folder / 'kappa_tradeoff.json').read_text())
    settings = [(row['kappa'], row['floor']) for row in report['mean']]
    assert settings == [(None, None), (2, 0), (2, 0.1), (21, 0), (21, 0.1)]
    (measured,) = report['images'].values()
    for row, mean in zip(measured, report['mean'], strict=True):
        assert row['sensitivity'] == mean['sensitivity']
    embedded, exact, floor, gentle, _ = report['mean']
    assert exact['kappa_reached'] == pytest.approx(2, rel=1e-2)
    assert embedded['kappa_reached'] > floor['kappa_reached'] > 2
    noise = [row['sensitivity']['noise'] for row in (exact, gentle, embedded)]
    assert noise == sorted(noise, reverse=True)
    lines = (folder / 'kappa_tradeoff.md').read_text().splitlines()
    assert len([line for line in lines if line.startswith('| 2, 0.1 |')]) == 1
    assert cv2.imread(str(folder / 'kappa_tradeoff.png')).shape[2] == 3


@pytest.mark.parametrize(
    ('args', 'words'),
    [
        ((CONFIG, '--kappa', 1), 'kappa must lie in (1, inf), but got 1.0'),
        (
            (CONFIG.with_name(CONFIG.name.replace('-condtok', '')),),
            'SwinTransformer has no conditioner attached',
        ),
    ],
)
def test_bad_arguments_are_named_and_leave_nothing(tmp_path, args, words):
    (tmp_path / 'images').mkdir()
    picture(tmp_path / 'images/photograph.png')
    tool = 'analysis_tools/kappa_tradeoff.py'
    printed = run(tmp_path, tool, *args, '--images', 'images', expected=1)
    assert words in printed
    assert 'Traceback' not in printed
    assert [path.name for path in tmp_path.iterdir()] == ['images']
