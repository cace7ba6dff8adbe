import copy

import numpy as np
import pytest
import torch
from mmpretrain.models import ViTSAM

from condtok_mm.conditioning import (
    TokenConditioner,
    attach_conditioner,
    calibrate_conditioner,
    fold_conditioner,
)
from condtok_mm.conditioning.attach import conditioned_layer
from condtok_mm.models import CondTokSwinTransformer, CondTokViT

from ..conftest import batch_images, photograph, randomise, relative_error

ARCH = dict(
    embed_dims=32,
    num_layers=2,
    num_heads=2,
    feedforward_channels=64,
    global_attn_indexes=(1,),
)


def build(**conditioner):
    model = CondTokViT(
        ARCH, img_size=64, window_size=3, use_rel_pos=True, conditioner=conditioner
    )
    return randomise(model).eval()


def raw_tokens(model, images):
    forward = conditioned_layer(model).forward
    tokens, valid = forward.tokens(images, forward.embed(images))
    return tokens.detach()[valid].double().numpy()


@pytest.mark.parametrize(('kappa', 'floor'), [(2.0, 0.1), (5.0, 0.3), (2.0, 0.0)])
def test_P_is_that_of_all_tokens_as_one_matrix(kappa, floor):
    model = build(kappa=kappa, floor=floor)
    batches = [
        batch_images([photograph(64, 80, 1), photograph(48, 96, 2)]),
        batch_images([photograph(80, 48, 3)]),
    ]
    calibrate_conditioner(model, batches)
    X = np.concatenate([raw_tokens(model, images) for images in batches])
    _, values, basis = np.linalg.svd(X, full_matrices=False)
    roots = np.sqrt(values**2 + (floor * values[0]) ** 2)
    P = np.eye(32) + values[0] / (kappa - 1) * (basis.T / roots) @ basis
    assert relative_error(model.conditioner.preconditioner, P) < 1e-5
    image = photograph(64, 96, 4)[None]
    actual, _ = model.patch_embed(image)
    assert relative_error(actual[0], raw_tokens(model, image) @ P) < 1e-5


def test_it_is_in_the_checkpoint_and_calibrates_what_loads_it():
    model = build(floor=0.1)
    before = set(model.state_dict())
    calibrate_conditioner(model, [photograph(64, 64)[None]])
    added = set(model.state_dict()) - before
    assert added == {'conditioner.preconditioner'}
    other = build(floor=0.1)
    other.load_state_dict(model.state_dict(), strict=True)
    copied = copy.deepcopy(model)
    image = photograph(64, 96, 5)[None]
    assert torch.equal(other(image)[0], model(image)[0])
    assert torch.equal(copied(image)[0], model(image)[0])
    assert 'calibrated' in repr(other.conditioner)


def test_half_precision_keeps_P_in_fp32():
    model = build(floor=0.0)
    calibrate_conditioner(model, [photograph(64, 64)[None]])
    matrix = model.conditioner.preconditioner.clone()
    for cast in (model.half, model.bfloat16, model.float):
        assert torch.equal(cast().conditioner.preconditioner, matrix)
    assert model.double().to('meta').conditioner.preconditioner.is_meta


def test_P_of_another_width_is_named():
    model = build(floor=0.1)
    state = model.state_dict() | {'conditioner.preconditioner': torch.eye(3, 5)}
    with pytest.raises(RuntimeError, match=r'must be square, but is \(3, 5\)'):
        model.load_state_dict(state)
    state['conditioner.preconditioner'] = torch.eye(64)
    model.load_state_dict(state)
    with pytest.raises(ValueError, match='for 64 channels, but got tokens with 32'):
        model(photograph(64, 64)[None])


def test_calibrated_tokens_that_would_overflow_pass_through():
    conditioner = TokenConditioner()
    conditioner.preconditioner = 1e3 * torch.eye(4)
    X = torch.full((1, 5, 4), 1e37)
    assert torch.equal(conditioner(X), X)


def test_strength_padding_and_gradient():
    conditioner = TokenConditioner(floor=0.1)
    conditioner.preconditioner = torch.randn(8, 8)
    X = torch.randn(2, 20, 8, requires_grad=True)
    valid = torch.rand(2, 20) < 0.5
    Y = conditioner(X, valid)
    torch.testing.assert_close(Y[valid], X[valid] @ conditioner.preconditioner)
    assert torch.equal(Y[~valid], X[~valid])
    Y.sum().backward()
    assert torch.equal(X.grad, torch.ones_like(X))
    conditioner.grad, X.grad = 'precondition', None
    conditioner(X).sum().backward()
    expected = conditioner.preconditioner.sum(1).expand_as(X)
    torch.testing.assert_close(X.grad, expected)
    conditioner.strength = 0.25
    expected = X + 0.25 * (X @ conditioner.preconditioner - X)
    torch.testing.assert_close(conditioner(X), expected)


def test_folded_checkpoint_in_the_stock_class(tmp_path):
    """Written to disk, and loaded by ViTSAM, which knows nothing of conditioning."""
    model = build(floor=0.1)
    calibrate_conditioner(model, [photograph(64, 80, i)[None] for i in range(4)])
    images = torch.stack([photograph(64, 96, i) for i in (7, 8)])
    expected = [out.detach() for out in model(images)]
    assert fold_conditioner(model) is model
    torch.save(model.state_dict(), tmp_path / 'folded.pth')
    stock = ViTSAM(
        ARCH,
        img_size=64,
        patch_size=16,
        window_size=3,
        out_channels=0,
        use_rel_pos=True,
    )
    stock.load_state_dict(torch.load(tmp_path / 'folded.pth'), strict=True)
    stock.eval()
    for mine, theirs in zip(expected, stock(images), strict=True):
        assert relative_error(theirs, mine) < 1e-4


def test_what_cannot_be_folded_says_why_and_stays_as_it_was():
    with pytest.raises(ValueError, match='not calibrated'):
        fold_conditioner(build(floor=0.1))
    rescaled = build(floor=0.1, rescale=True)
    calibrate_conditioner(rescaled, [photograph(64, 64)[None]])
    with pytest.raises(ValueError, match='rescale=True'):
        fold_conditioner(rescaled)
    swin = CondTokSwinTransformer(
        embed_dims=24, num_heads=(1, 2, 4, 8), conditioner=dict(floor=0.1)
    )
    calibrate_conditioner(swin, [photograph(64, 64)[None]])
    weight = swin.patch_embed.projection.weight.clone()
    with pytest.raises(ValueError, match='more than one convolution'):
        fold_conditioner(swin)
    assert torch.equal(swin.patch_embed.projection.weight, weight)


def test_convolution_without_a_bias():
    backbone = torch.nn.Module()
    backbone.stem = torch.nn.Conv2d(3, 8, 4, 4, bias=False)
    attach_conditioner(backbone, TokenConditioner(floor=0.1), embed='stem')
    image = photograph(32, 48)[None]
    calibrate_conditioner(backbone, [image])
    expected = backbone.stem(image)
    fold_conditioner(backbone)
    assert relative_error(backbone.stem(image), expected.detach()) < 1e-5


@pytest.mark.parametrize(
    'batches',
    [[], [torch.zeros(1, 3, 64, 64)], [torch.full((1, 3, 64, 64), torch.nan)]],
)
def test_nothing_to_calibrate_on(batches):
    model = build(floor=0.1)
    with pytest.raises(ValueError, match='no token to calibrate on'):
        calibrate_conditioner(model, batches)
    assert model.conditioner.preconditioner is None
