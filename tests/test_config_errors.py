"""Wrong types and values of every public argument are refused in one sentence."""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch
from mmdet.models.backbones import SwinTransformer
from mmengine.optim import DefaultOptimWrapperConstructor, build_optim_wrapper
from mmpretrain.models.backbones import XCiT
from torch import nn

import condtok_mm
from condtok_mm.arguments import shown
from condtok_mm.conditioning import (
    TokenConditioner,
    attach_conditioner,
    calibrate_conditioner,
    condition_number,
    fold_conditioner,
)
from condtok_mm.datasets import make_shapes
from condtok_mm.engine import ConditionNumberHook, KappaWarmupHook
from condtok_mm.engine.optimizers import layer_decay
from condtok_mm.models import (
    CondTok,
    CondTokSwinTransformer,
    CondTokViT,
    CondTokXCiT,
    SimpleFPN,
)
from condtok_mm.models.arguments import CHECKS

WRONG = dict(
    none=None,
    true=True,
    text='nonsense',
    nan=math.nan,
    infinite=math.inf,
    negative=-1,
    fraction=2.5,
    empty=[],
    nothing={},
    nested=[[1]],
    mapping=dict(a=dict(b=1)),
    thing=object(),
    long=list(range(500)),
)
"""What is no value of most arguments."""

VIT = dict(arch=dict(embed_dims=16, num_layers=4, num_heads=2), img_size=32)
XCIT = dict(arch=dict(embed_dims=16, depth=6, num_heads=2), img_size=32)
SWIN = dict(embed_dims=8, depths=(1, 1), num_heads=(1, 2), strides=(4, 2))
SWIN |= dict(out_indices=(0, 1))
PLAIN = dict(type='PyramidVisionTransformer', embed_dims=8, num_layers=[1, 1])
PLAIN |= dict(
    num_stages=2, num_heads=[1, 1], patch_sizes=[4, 2], strides=[4, 2], paddings=[0, 0]
)
PLAIN |= dict(sr_ratios=[1, 1], out_indices=(0, 1), mlp_ratios=[1, 1])


def detector():
    model = nn.Module()
    model.backbone = CondTokViT(**VIT)
    return model


def layer_decayed(**paramwise_cfg):
    cfg = dict(
        constructor='LayerDecayOptimWrapperConstructor',
        optimizer=dict(type='AdamW', lr=0.1, weight_decay=0.1),
        paramwise_cfg=dict(decay_rate=0.5) | paramwise_cfg,
    )
    return build_optim_wrapper(detector(), cfg)


def conditioned():
    return CondTokViT(**VIT, conditioner=dict())


def set_strength(strength):
    TokenConditioner().strength = strength


FLAG = ('true', [1, 0, 'True'])
COUNT = ('', [0, 1.0, '1', -(10**30)])
LAYER = ('', [dict(type='Nonsense'), dict(type=None), dict(type='LN', nonsense=1)])
RATE = ('', [1.0, -0.1, '0.1'])
INIT = ('none empty', [[1], dict(kind='Normal')])
EMBED = ('none text', [1, ['patch_embed']])
BACKBONE = ('', [nn.Linear, dict(type='PyramidVisionTransformer')])
MATCHED = ('', [1.1, -0.1, '0.9'])
CONDITIONER = ('none nothing', [dict(kapa=2.0), dict(type='Nonsense'), {1: 2}])
MULTIPLIER = ('fraction', [-0.1, '1'])

STOCK = dict(
    act_cfg=('', [dict(type='Nonsense'), dict(type=None), dict(type='GELU', a=1)]),
    attn_drop_rate=RATE,
    bn_norm_cfg=LAYER,
    cls_attn_layers=('', [-2, 1.0]),
    convert_weights=FLAG,
    depths=('long', [(1, 0), (1.0, 1), 2, '12']),
    drop_path_rate=RATE,
    drop_rate=RATE,
    embed_dims=COUNT,
    final_norm=FLAG,
    frozen_stages=('negative', [-2, 99, 0.0, '1']),
    img_size=('', [0, (32,), (32, 32, 32), (32, 0), '32']),
    in_channels=COUNT,
    init_cfg=INIT,
    layer_scale_init_value=('fraction', ['1']),
    mlp_ratio=('fraction', [0, '4']),
    norm_cfg=LAYER,
    num_heads=('', [(1, 0), 3, (1, 3), (1,), 'two']),
    out_indices=('', [(0, 99), (0.0, 1), '01']),
    patch_norm=FLAG,
    patch_size=COUNT,
    pretrain_img_size=('', [0, (32, 0), '32']),
    qk_scale=('none fraction', [0, '1']),
    qkv_bias=FLAG,
    strides=('', [(4,), (2, 2), (4, 0), 4]),
    tokens_norm=FLAG,
    use_abs_pos=FLAG,
    use_abs_pos_embed=FLAG,
    use_pos_embed=FLAG,
    use_rel_pos=FLAG,
    window_size=COUNT,
    with_cp=FLAG,
)
OWN = dict(attn=('', ['Fused', 'flash']), conditioner=CONDITIONER, min_matched=MATCHED)
SHAPES = dict.fromkeys(('num_train', 'num_val'), COUNT)
SHAPES |= dict(root=('text', [b'set']), image_size=('', [63, 64.0]), seed=('', [0.0]))
SHAPES |= dict.fromkeys(('overwrite', 'progress'), FLAG)
RTOL = ('none', [0, 1, '1e-3'])
PAD = ('none negative fraction long', [[0, 'a', 0], [math.nan], 10**400, (True,)])

# Target, what it is called with, and for each argument the names of those of WRONG that
# it takes and what else it does not take.
TARGETS = [
    (
        TokenConditioner,
        dict(),
        dict(
            kappa=('fraction', [1, 0, -math.inf, 10**400, '2', 2j]),
            solver=('', ['SVD', 3]),
            floor=('', [1.1, -0.1, '0']),
            rtol=RTOL,
            grad=('', ['none', 3]),
            rescale=FLAG,
            pad_value=PAD,
        ),
    ),
    (set_strength, dict(), dict(strength=('', [1.1, -0.1, '1']))),
    (
        attach_conditioner,
        dict(backbone=nn.Identity(), conditioner=TokenConditioner()),
        dict(
            backbone=BACKBONE,
            conditioner=('', [TokenConditioner, dict(kappa=2.0)]),
            embed=('text', [1]),
        ),
    ),
    (
        condition_number,
        dict(tokens=torch.ones(1, 2, 2)),
        dict(
            tokens=('', [torch.ones(2, 2), torch.ones(1, 2, 2).int()]),
            valid=('none', [torch.ones(1, 2), torch.ones(2, 1).bool()]),
            rtol=RTOL,
        ),
    ),
    (
        calibrate_conditioner,
        dict(backbone=conditioned(), batches=[torch.ones(1, 3, 32, 32)]),
        dict(
            backbone=BACKBONE, batches=('', [torch.ones(3, 32, 32), [None], iter('a')])
        ),
    ),
    (fold_conditioner, dict(), dict(backbone=BACKBONE)),
    (CondTokSwinTransformer, SWIN, STOCK | OWN | dict(pretrained=('none text', [1]))),
    (
        CondTokViT,
        VIT,
        STOCK
        | OWN
        | dict(
            arch=(
                '',
                [
                    'huge',
                    VIT['arch'] | dict(num_layers=0),
                    VIT['arch'] | dict(num_heads=True),
                    VIT['arch'] | dict(global_attn_indexes=5),
                    VIT['arch'] | dict(global_attn_indexes=[9]),
                    VIT['arch'] | dict(feedforward_channels='4'),
                    VIT['arch'] | {1: 2},
                ],
            ),
            out_indices=('negative', [4, (0, 0), 'ab', 0.0]),
            init_cfg=INIT,
        ),
    ),
    (
        CondTokXCiT,
        XCIT,
        STOCK
        | OWN
        | dict(
            arch=(
                'nothing',
                ['huge', XCIT['arch'] | dict(depth=0), XCIT['arch'] | {1: 2}],
            ),
            out_indices=('none', [(0, 1, 2), (0, 2, 1, 3), (0, 1, 2, 9), 3]),
            patch_size=('', [0, 32, 16.0, '16']),
        ),
    ),
    (
        CondTok,
        dict(backbone=PLAIN),
        OWN | dict(backbone=('', [dict(type='Nonsense'), dict(type=3)]), embed=EMBED),
    ),
    (
        SimpleFPN,
        dict(in_channels=16),
        STOCK
        | dict(in_channels=('', [0, 30, 32.0]), num_outs=('', [3, '5']))
        | dict(out_channels=COUNT),
    ),
    (
        KappaWarmupHook,
        dict(end=2),
        dict(end=('', [0, '2', 2.0]), begin=('', [2, '0']), by_epoch=FLAG),
    ),
    (
        ConditionNumberHook,
        dict(),
        dict(interval=COUNT, embed=EMBED, pad_value=PAD),
    ),
    (make_shapes, dict(root='unused'), SHAPES),
]


def arguments_of(target):
    """Names of the arguments, with those that are passed on to a stock class."""
    stock = {CondTokSwinTransformer: SwinTransformer, CondTokXCiT: XCiT}.get(target)
    own = inspect.signature(target).parameters.values()
    names = [p.name for p in own if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if stock is not None:
        names += [n for n in inspect.signature(stock).parameters if n not in names]
    held = {'out_type', *XCIT['arch'], 'layer_scale_init_value'}
    return [n for n in names if target is not CondTokXCiT or n not in held]


CASES = [
    pytest.param(target, kwargs, name, cases.get(name), id=f'{target.__name__}-{name}')
    for target, kwargs, cases in TARGETS
    for name in arguments_of(target)
]
CASES += [
    pytest.param(layer_decayed, {}, name, case, id=f'layer_decayed-{name}')
    for name, case in (
        dict.fromkeys(layer_decay.MULTIPLIERS, MULTIPLIER)
        | dict(
            decay_rate=('', [0, 1.1, '0.7']),
            bypass_duplicate=FLAG,
            custom_keys=(
                'nothing mapping',
                [dict(a=1), {1: {}}, dict(a=dict(lr_mult='2'))],
            ),
        )
    ).items()
]


@pytest.mark.parametrize(('target', 'kwargs', 'name', 'case'), CASES)
def test_wrong_argument_is_named(target, kwargs, name, case):
    assert case is not None, f'{name} is new: say here what it does not take.'
    taken, further = case
    wrong = [value for label, value in WRONG.items() if label not in taken.split()]
    for value in wrong + further:
        with pytest.raises((TypeError, ValueError)) as caught:
            target(**kwargs | {name: value})
        message = str(caught.value)
        assert re.search(rf'\b{name}\b', message), message
        assert message.endswith('.'), message
        assert '\n' not in message
        assert '. ' not in message.replace(shown(value), ''), message
        assert len(message) < 700, message
        last = Path(caught.traceback[-1].path)
        assert last.is_relative_to(Path(condtok_mm.__file__).parent), (value, last)


def test_every_check_and_key_has_a_case():
    """Also for keys that another mmengine reads from paramwise_cfg."""
    source = inspect.getsource(DefaultOptimWrapperConstructor)
    read = set(re.findall(r"paramwise_cfg\.get\(\s*'(\w+)'", source))
    assert read <= set(layer_decay.KEYS)
    named = {case.values[2] for case in CASES}
    assert set(layer_decay.KEYS) <= named
    arch = {'depth', 'num_heads', 'num_layers', 'feedforward_channels', 'embed_dims'}
    arch |= {'layer_scale_init_value'}
    assert set(CHECKS) <= named | arch


def test_stock_arguments_in_an_arch():
    for name in ('depth', 'num_heads', 'embed_dims', 'layer_scale_init_value'):
        for value in (None, 'a', True, math.nan, [], {}):
            with pytest.raises((TypeError, ValueError), match=name):
                CondTokXCiT(**XCIT | dict(arch=XCIT['arch'] | {name: value}))


@pytest.mark.parametrize(
    ('target', 'kwargs', 'words'),
    [
        (CondTokSwinTransformer, dict(depth=(1, 1)), r"'depth'; it takes .*depths"),
        (CondTokXCiT, dict(drop_rat=0.1), "'drop_rat'; it takes .*drop_rate"),
        (CondTokXCiT, dict(depth=3), 'no depth beside arch'),
        (CondTokXCiT, dict(out_type='raw'), 'no out_type'),
    ],
)
def test_unknown_argument_is_named(target, kwargs, words):
    with pytest.raises(TypeError, match=words):
        target(**(SWIN if target is CondTokSwinTransformer else XCIT) | kwargs)


def test_unknown_key_of_paramwise_cfg_is_named():
    with pytest.raises(ValueError, match=r'no key norm_decay_mul; .*norm_decay_mult'):
        layer_decayed(norm_decay_mul=0.0)


def test_what_is_right_is_taken():
    three = dict(embed_dims=12, depths=[1, 1, 1], out_indices=[2])
    CondTokSwinTransformer(**three, conditioner=dict(pad_value=[0, 0.5, 1]))
    CondTokXCiT(**XCIT, out_indices=[0, 1, 2, 3])
    CondTok(PLAIN, embed='layers.0.0', conditioner=dict())
    SimpleFPN(16, norm_cfg=dict(type='GN', num_groups=2), init_cfg=[])
    layer_decayed(custom_keys=dict(pos_embed=dict(lr_mult=2, decay_mult=0.0)))
