import pytest
from mmengine.optim import build_optim_wrapper
from torch import nn

from condtok_mm.models import CondTokViT, SimpleFPN

ARCH = dict(embed_dims=16, num_layers=2, num_heads=2)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = CondTokViT(ARCH, img_size=32, patch_size=8, use_rel_pos=True)
        self.neck = SimpleFPN(16, out_channels=8)


def build(model, **paramwise):
    return build_optim_wrapper(
        model,
        dict(
            type='OptimWrapper',
            constructor='LayerDecayOptimWrapperConstructor',
            paramwise_cfg=paramwise,
            optimizer=dict(type='AdamW', lr=1e-2, weight_decay=0.1),
        ),
    )


def test_rates_and_decay_of_every_parameter():
    model = Detector()
    wrapper = build(
        model,
        decay_rate=0.5,
        norm_decay_mult=0.0,
        custom_keys={'pos_embed': dict(decay_mult=0.0), 'proj.': dict(lr_mult=2.0)},
    )
    groups = {
        id(parameter): group
        for group in wrapper.optimizer.param_groups
        for parameter in group['params']
    }
    assert len(groups) == len(list(model.parameters()))
    assert len(wrapper.optimizer.param_groups) < 12
    expected = {
        'backbone.pos_embed': (1e-2 * 0.5**3, 0.0),
        'backbone.patch_embed.projection.weight': (1e-2 * 0.5**3, 0.1),
        'backbone.layers.0.attn.qkv.weight': (1e-2 * 0.5**2, 0.1),
        'backbone.layers.0.attn.proj.weight': (2e-2 * 0.5**2, 0.1),
        'backbone.layers.0.ln1.weight': (1e-2 * 0.5**2, 0.0),
        'backbone.layers.1.ffn.layers.1.bias': (1e-2 * 0.5, 0.1),
        'neck.convs.0.0.conv.weight': (1e-2, 0.1),
    }
    parameters = dict(model.named_parameters())
    for name, (rate, decay) in expected.items():
        group = groups[id(parameters[name])]
        assert group['lr'] == pytest.approx(rate), name
        assert group['weight_decay'] == decay, name


def test_frozen_parameters_are_left_out():
    model = Detector()
    model.backbone.patch_embed.requires_grad_(False)
    wrapper = build(model, decay_rate=0.7)
    optimized = {
        id(p) for group in wrapper.optimizer.param_groups for p in group['params']
    }
    assert optimized == {id(p) for p in model.parameters() if p.requires_grad}


@pytest.mark.parametrize('rate', [None, 0, 1.5, 'high', True])
def test_bad_rate_is_named(rate):
    with pytest.raises(ValueError, match=rf'decay_rate must lie in.*{rate}'):
        build(Detector(), decay_rate=rate)


def test_optimizers_without_weight_decay_or_rate():
    cfg = dict(
        constructor='LayerDecayOptimWrapperConstructor',
        paramwise_cfg=dict(decay_rate=0.5),
    )
    wrapper = build_optim_wrapper(
        Detector(), dict(cfg, optimizer=dict(type='SGD', lr=0.1))
    )
    rates = {round(group['lr'], 6) for group in wrapper.optimizer.param_groups}
    assert rates == {0.1, 0.05, 0.025, 0.0125}
    with pytest.raises(ValueError, match=r'optimizer\.lr, which is missing'):
        build_optim_wrapper(Detector(), dict(cfg, optimizer=dict(type='AdamW')))


def test_backbone_without_depth_is_named():
    model = Detector()
    model.backbone = nn.Linear(2, 2)
    with pytest.raises(ValueError, match='Linear has no get_layer_depth'):
        build(model, decay_rate=0.5)
