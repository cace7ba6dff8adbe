import copy
import io

import numpy as np
import pytest
import torch
from mmdet.models import SwinTransformer
from mmdet.registry import MODELS

from condtok_mm.conditioning import (
    TokenConditioner,
    condition_number,
    detach_conditioner,
)
from condtok_mm.models import CondTokSwinTransformer

from ..conftest import batch_images, photograph, randomise, reference, relative_error

SMALL = dict(embed_dims=24, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))


def build(conditioner=None, **kwargs):
    model = CondTokSwinTransformer(**SMALL | kwargs, conditioner=conditioner)
    return randomise(model).eval()


def stock_twin(model, **kwargs):
    stock = SwinTransformer(**(SMALL | kwargs))
    stock.load_state_dict(model.state_dict(), strict=True)
    stock.eval()
    return stock


def gradients(model, images):
    model.zero_grad()
    sum(out.square().sum() for out in model(images)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize('size', [(64, 64), (97, 130)], ids=str)
def test_off_is_bit_identical_to_stock(size):
    model = build(attn='stock')
    stock = stock_twin(model)
    assert list(model.state_dict()) == list(stock.state_dict())
    images = torch.randn(2, 3, *size)
    for mine, theirs in zip(model(images), stock(images), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(
        gradients(model, images), gradients(stock, images), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_checkpoints_go_both_ways_and_detach_restores_stock():
    model = build(dict(kappa=2.0, floor=0.1), attn='stock')
    stock = stock_twin(model)
    build(dict()).load_state_dict(stock.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    assert not torch.equal(model(images)[0], stock(images)[0])
    detach_conditioner(model)
    assert torch.equal(model(images)[0], stock(images)[0])
    assert not model._forward_pre_hooks


def test_tokens_of_a_photograph_have_rank_49():
    """Patches of 4 x 4 x 3 pixels span 48 of 96 channels; the norm adds one."""
    model = CondTokSwinTransformer(conditioner=dict(solver='eigh'))
    model.init_weights()
    image = photograph(400, 608)[None]
    with torch.no_grad():
        Y = model.patch_embed(image)[0][0]
        model.conditioner.strength = 0
        X = model.patch_embed(image)[0][0]
    assert condition_number(X[None])[1].item() == 49
    _, values, right = np.linalg.svd(X.double().numpy(), full_matrices=False)
    outside = np.linalg.norm((Y - X).double().numpy() @ right[49:].T, 2)
    assert outside < 1e-4 * values[0]
    assert relative_error(Y, reference(X)) < 1e-3
    new = np.linalg.svd(Y.double().numpy(), compute_uv=False)
    assert new[0] / new[48] <= 2.02


@pytest.mark.parametrize(('floor', 'tolerance'), [(0.1, 1e-4), (0.0, 1e-3)])
def test_batch_mates_do_not_matter(floor, tolerance):
    """Images of two shapes in one batch, and each alone, through the preprocessor."""
    detector = MODELS.build(
        dict(
            type='DetDataPreprocessor',
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
            bgr_to_rgb=True,
            pad_size_divisor=32,
        )
    )
    photos = [photograph(480, 640, 1), photograph(640, 427, 2)]
    photos = [(60 * photo + 120).clamp(0, 255).byte() for photo in photos]

    def preprocess(images):
        return detector(dict(inputs=images, data_samples=None))['inputs']

    model = build(dict(floor=floor), embed_dims=96, num_heads=(3, 6, 12, 24))
    with torch.no_grad():
        both, (_, columns) = model.patch_embed(preprocess(photos))
        for index, photo in enumerate(photos):
            alone, grid = model.patch_embed(preprocess([photo]))
            height, width = -(-photo.shape[1] // 4), -(-photo.shape[2] // 4)
            alone = alone.view(*grid, -1)[:height, :width]
            batched = both[index].view(-1, columns, 96)[:height, :width]
            assert relative_error(batched, alone) < tolerance
            model.conditioner.strength = 0
            stock = model.patch_embed(preprocess([photo]))[0].view(*grid, -1)
            model.conditioner.strength = 1
            assert relative_error(batched, stock[:height, :width]) > 0.1


def test_pixels_of_one_image_leave_the_features_of_another_bit_identical():
    model = build(dict(floor=0.1))
    images = batch_images([photograph(96, 128, 1), photograph(128, 70, 2)])
    changed = images.clone()
    changed[0, :, :96, :128] = photograph(96, 128, 3)
    with torch.no_grad():
        for before, after in zip(model(images), model(changed), strict=True):
            assert torch.equal(before[1], after[1])
            assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize('floor', [0.0, 0.1])
def test_autocast_computes_tokens_in_float32(floor):
    model = build(dict(floor=floor))
    stock = stock_twin(model)
    image = photograph(128, 160)[None]
    with torch.no_grad():
        exact, _ = model.patch_embed(image)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            tokens, _ = model.patch_embed(image)
            assert tokens.dtype == stock.patch_embed(image)[0].dtype
            features = model(image)
            assert [f.dtype for f in features] == [f.dtype for f in stock(image)]
    assert relative_error(tokens.double(), exact) < 1e-2


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_weights(dtype):
    model = build(dict(floor=0.1)).to(dtype)
    image = photograph(64, 96)[None].to(dtype)
    with torch.no_grad():
        tokens, _ = model.patch_embed(image)
        exact, _ = copy.deepcopy(model).float().patch_embed(image.float())
    assert tokens.dtype == dtype
    assert relative_error(tokens.double(), exact) < torch.finfo(dtype).eps
    model.patch_embed(image)[0].sum().backward()
    assert model.patch_embed.projection.weight.grad.dtype == dtype


def test_copies_and_pickles_keep_their_own_conditioner():
    model = build(dict(floor=0.1))
    image = torch.randn(1, 3, 64, 64)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(image)[0], model(image)[0])
        assert twin.conditioner is not model.conditioner
        twin.conditioner.strength = 0
        assert not torch.equal(twin(image)[0], model(image)[0])


@pytest.mark.parametrize('kwargs', [dict(frozen_stages=1), dict(with_cp=True)])
def test_training_options(kwargs):
    model = build(dict(floor=0.1), **kwargs)
    assert model.train() is model
    assert model.eval() is model
    model.train()
    sum(out.sum() for out in model(torch.randn(2, 3, 64, 64))).backward()
    for name, parameter in model.named_parameters():
        frozen = 'frozen_stages' in kwargs and name.startswith(
            ('patch_embed', 'stages.0', 'norm0')
        )
        assert (parameter.grad is None) == frozen, name


@pytest.mark.parametrize('scope', ['', 'mmdet.', 'mmpretrain.', 'mmengine.'])
def test_found_from_every_scope(scope):
    import mmengine
    import mmpretrain.registry

    for registry in (mmengine.MODELS, MODELS, mmpretrain.registry.MODELS):
        assert registry.get(f'{scope}CondTokSwinTransformer') is CondTokSwinTransformer


@pytest.mark.parametrize(
    ('conditioner', 'error', 'words'),
    [
        (dict(kapa=2.0), TypeError, 'no argument kapa; it takes kappa, solver'),
        (dict(kappa=0.5), ValueError, 'kappa'),
        ('on', TypeError, "must be a dict of .* or None, but got 'on'"),
        (2.0, TypeError, 'but got 2.0'),
    ],
)
def test_bad_conditioner_is_named(conditioner, error, words):
    with pytest.raises(error, match=words):
        build(conditioner)


def test_ready_made_conditioner():
    conditioner = TokenConditioner(kappa=3.0, floor=0.2)
    assert build(conditioner).conditioner is conditioner
