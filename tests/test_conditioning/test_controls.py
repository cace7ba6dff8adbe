"""Controls: as much scale as conditioning gives, and no conditioning."""

import numpy as np
import pytest
import torch

from condtok_mm.conditioning import (
    ScaleControl,
    calibrate_conditioner,
    condition_number,
    fold_conditioner,
)
from condtok_mm.models import CondTokViT

from ..conftest import make_tokens, reference

ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, global_attn_indexes=(1,))


def vit(**conditioner):
    return CondTokViT(
        arch=ARCH,
        img_size=64,
        patch_size=8,
        window_size=4,
        conditioner=dict(type='ScaleControl', **conditioner),
    ).eval()


@pytest.mark.parametrize('floor', [0.0, 0.1])
def test_norm_grows_as_with_conditioning_and_kappa_does_not_change(floor):
    X = torch.stack([make_tokens(300, 48, 1e3, seed=seed) for seed in range(2)])
    valid = torch.ones(2, 300, dtype=torch.bool)
    valid[1, 200:] = False
    X[1, 200:] = 7.0
    Y = ScaleControl(kappa=3.0, floor=floor)(X, valid)
    for tokens, scaled, kept in zip(X, Y, valid, strict=True):
        rows = tokens[kept].double().numpy()
        conditioned = reference(rows, kappa=3.0, floor=floor)
        growth = np.linalg.norm(conditioned) / np.linalg.norm(rows)
        np.testing.assert_allclose(scaled[kept], growth * rows, rtol=1e-5)
    torch.testing.assert_close(Y[1, 200:], X[1, 200:], rtol=0, atol=0)
    before, after = (condition_number(tokens, valid)[0] for tokens in (X, Y))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=0)


def test_factor_is_constant_for_the_gradient():
    X = make_tokens(100, 16, 1e2)[None].requires_grad_()
    Y = ScaleControl()(X)
    Y.sum().backward()
    growth = (Y.norm() / X.norm()).item()
    torch.testing.assert_close(X.grad, torch.full_like(X, growth))


def test_image_that_holds_nan_or_does_not_fit_passes_through():
    X = make_tokens(50, 16, 1e2)[None].repeat(3, 1, 1)
    X[0, 3, 2] = float('nan')
    X[1] = 0
    X[2] *= 65504 / X[2].abs().max()
    Y = ScaleControl()(X.half())
    torch.testing.assert_close(Y, X.half(), rtol=0, atol=0, equal_nan=True)


def test_config_switch_and_what_makes_no_sense():
    images = torch.rand(1, 3, 64, 64)
    backbone = vit(floor=0.1)
    assert isinstance(backbone.conditioner, ScaleControl)
    assert 'scale alone' in repr(backbone.conditioner)
    assert backbone(images)[0].isfinite().all()
    with pytest.raises(ValueError, match='rescale'):
        vit(rescale=True)
    with pytest.raises(ValueError, match=r"one of .*'ScaleControl', but got 'X'"):
        CondTokViT(arch=ARCH, conditioner=dict(type='X'))
    calibrate_conditioner(backbone, [images])
    with pytest.raises(ValueError, match='ScaleControl depends on each image'):
        fold_conditioner(backbone)


def test_patch_norm_is_a_layer_norm_behind_the_patch_embedding():
    backbone = CondTokViT(arch=ARCH, img_size=64, patch_size=8, patch_norm=True)
    assert {'patch_embed.norm.weight', 'patch_embed.norm.bias'} <= set(
        backbone.state_dict()
    )
    tokens, _ = backbone.patch_embed(torch.rand(1, 3, 64, 64))
    np.testing.assert_allclose(tokens.mean(-1).detach(), 0, atol=1e-5)
    np.testing.assert_allclose(tokens.std(-1, unbiased=False).detach(), 1, atol=1e-2)
