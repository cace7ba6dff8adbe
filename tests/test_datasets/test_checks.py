import logging

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger

from condtok_mm.datasets.checks import padding_conflicts
from condtok_mm.models import CondTokViT

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
ARCH = dict(embed_dims=16, num_layers=1, num_heads=1)


def config(pipeline=(), **preprocessor):
    preprocessor = dict(mean=MEAN, std=STD, bgr_to_rgb=True) | preprocessor
    return dict(
        model=dict(data_preprocessor=preprocessor),
        train_dataloader=dict(
            dataset=dict(type='RepeatDataset', dataset=dict(pipeline=list(pipeline)))
        ),
    )


def test_no_padding_but_the_preprocessors():
    assert padding_conflicts(config(), 0.0) == []
    assert padding_conflicts({}, 0.0) == []
    assert padding_conflicts(dict(model=None), 0.0) == []


def test_pad_before_normalisation():
    pad = dict(type='Pad', size=(64, 64), pad_val=dict(img=(114, 114, 114)))
    (sentence,) = padding_conflicts(config([pad]), 0.0)
    assert 'Pad in the pipeline of train_dataloader' in sentence
    assert '[-0.1657, -0.0399, 0.1825]' in sentence
    values = [(114 - mean) / std for mean, std in zip(MEAN, STD, strict=True)]
    assert padding_conflicts(config([pad]), values) == []
    assert padding_conflicts(config([pad], pad_value=None), [0.0, 1.0]) == []


def test_channel_order_of_pad():
    """Pipelines pad BGR images; the mean is RGB."""
    pad = dict(type='mmdet.Pad', pad_val=dict(img=MEAN[::-1]))
    assert padding_conflicts(config([pad]), 0.0) == []
    assert len(padding_conflicts(config([pad], bgr_to_rgb=False), 0.0)) == 1


def test_pad_inside_other_transforms_and_its_default():
    nested = dict(type='RandomApply', transforms=[dict(type='Pad', size_divisor=32)])
    assert 'Pad in the pipeline' in padding_conflicts(config([nested]), 0.0)[0]


def test_padding_after_normalisation():
    augments = [dict(type='BatchFixedSizePad', size=(64, 64), img_pad_value=3)]
    found = padding_conflicts(config(pad_value=1, batch_augments=augments), 0.0)
    assert len(found) == 2
    assert 'data_preprocessor pads images with 1.0' in found[0]
    assert 'BatchFixedSizePad in data_preprocessor pads images with 3.0' in found[1]


@pytest.mark.parametrize(('pad_value', 'warned'), [(0.0, True), (None, False)])
def test_warned_about_once_at_the_first_forward(pad_value, warned):
    hub = MessageHub.get_current_instance()
    pad = dict(type='Pad', size=(64, 64), pad_val=114)
    hub.update_info('cfg', Config(config([pad])).pretty_text)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    try:
        model = CondTokViT(ARCH, img_size=16, conditioner=dict(pad_value=pad_value))
        for _ in range(2):
            model(torch.randn(1, 3, 16, 16))
    finally:
        logger.removeHandler(handler)
        hub.runtime_info.pop('cfg')
    warnings = [r for r in records if r.levelno == logging.WARNING]
    assert len(warnings) == warned
    lines = [r.getMessage() for r in records if r.levelno == logging.INFO]
    assert any('conditioned behind patch_embed (kappa=2, floor=0' in x for x in lines)
