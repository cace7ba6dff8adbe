"""What holds for all tokens and images, tried on many of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from condtok_mm.conditioning import (
    ScaleControl,
    TokenConditioner,
    attach_conditioner,
    condition_number,
    valid_tokens,
)
from condtok_mm.conditioning.polar import GRAM_RTOL
from condtok_mm.conditioning.spectrum import default_rtol

from ..conftest import batch_images, reference, relative_error

SOLVERS = ['auto', 'svd', 'eigh', 'newton_schulz']
GRADS = ['detach', 'precondition', 'full']
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {'svd': 2e-6, 'auto': 1e-4, 'eigh': 1e-4, 'newton_schulz': 1e-4}
"""Relative error of X + C from ``floor=0.03`` on."""


def examples(count):
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


seeds = st.integers(0, 2**32 - 1)
floors = st.sampled_from([0.03, 0.1, 0.3, 1.0])
kappas = st.sampled_from([1.01, 1.5, 2.0, 21.0, 1e4])


@st.composite
def batches(draw, dtypes=(torch.float32,), scales=(-30, 30), ill=3, largest=24):
    """Token matrices (B, N, D): any rank, scale and spectrum, as float64 sees them."""
    batch = draw(st.integers(1, 3))
    count, width = draw(st.integers(1, 2 * largest)), draw(st.integers(1, largest))
    dtype = draw(st.sampled_from(dtypes))
    if dtype == torch.float16:
        scales = (-1, 1)
    rng = np.random.default_rng(draw(seeds))
    matrices = []
    for _ in range(batch):
        rank = draw(st.integers(0, min(count, width)))
        left = np.linalg.qr(rng.normal(size=(count, max(rank, 1))))[0][:, :rank]
        right = np.linalg.qr(rng.normal(size=(width, max(rank, 1))))[0][:, :rank]
        values = np.logspace(0, -draw(st.integers(0, ill)), rank)
        matrices.append((left * values) @ right.T)
    scale = 10.0 ** draw(st.integers(*scales))
    return torch.from_numpy(scale * np.stack(matrices)).to(dtype)


def masks(tokens, seed):
    """Valid tokens (B, N), none in some images."""
    generator = torch.Generator().manual_seed(seed % 2**31)
    share = torch.rand(len(tokens), 1, generator=generator)
    return torch.rand(tokens.shape[:2], generator=generator) < share


@examples(60)
@given(batches(DTYPES), st.sampled_from(SOLVERS), floors, kappas)
def test_reference_with_a_floor(X, solver, floor, kappa):
    Y = TokenConditioner(kappa, solver, floor)(X)
    assert (Y.dtype, Y.shape) == (X.dtype, X.shape)
    assert Y.isfinite().all()
    tolerance = TOLERANCE[solver] + 2 * torch.finfo(X.dtype).eps
    for x, y in zip(X.double(), Y.double(), strict=True):
        expected = reference(x, kappa, floor)
        if np.abs(expected).max() > torch.finfo(X.dtype).max:
            expected = x
        scale = np.linalg.norm(expected)
        assert np.linalg.norm(y.numpy() - np.asarray(expected)) <= tolerance * scale


@examples(40)
@given(batches([torch.float32, torch.float64]), st.sampled_from(SOLVERS), kappas)
def test_reference_and_bound_without_a_floor(X, solver, kappa):
    exact = solver in ('auto', 'svd')
    rtol = default_rtol(X.dtype)
    rtol = rtol if exact else max(rtol, GRAM_RTOL)
    Y = TokenConditioner(kappa, solver)(X)
    for x, y in zip(X.double().numpy(), Y.double().numpy(), strict=True):
        values = np.linalg.svd(x, compute_uv=False)
        inside = values > rtol * values[0]
        # On the edge of the range either answer is right.
        near = (values > rtol / 4 * values[0]) & (values < 40 * rtol * values[0])
        if near.any() or not inside.any():
            assert np.isfinite(y).all()
            continue
        assert relative_error(y, reference(x, kappa, rtol=rtol)) < 1e-3
        after = np.linalg.svd(y, compute_uv=False)
        assert after[0] / after[inside.sum() - 1] <= 1.01 * kappa


@examples(40)
@given(
    batches(DTYPES),
    st.sampled_from([TokenConditioner, ScaleControl]),
    st.sampled_from(SOLVERS),
    st.sampled_from([0.0, 0.1]),
    seeds,
)
def test_each_image_is_alone_in_its_batch(X, kind, solver, floor, seed):
    """Bit for bit: neither places nor what the others hold matter."""
    conditioner = kind(solver=solver, floor=floor)
    valid = masks(X, seed)
    Y = conditioner(X, valid)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(X)))
    assert torch.equal(conditioner(X[order], valid[order]), Y[order])
    for index in range(len(X)):
        others = torch.arange(len(X)) != index
        for filling in (0.0, math.nan, 1.0):
            mixed = X.masked_fill(others[:, None, None], filling)
            assert torch.equal(conditioner(mixed, valid)[index], Y[index])


@examples(40)
@given(
    batches([torch.float32, torch.float64], scales=(-3, 3)),
    st.sampled_from([TokenConditioner, ScaleControl]),
    st.sampled_from(SOLVERS),
    st.sampled_from([0.0, 1e-3, 0.1]),
    st.integers(-80, 80),
)
def test_powers_of_two_pass_through(X, kind, solver, floor, power):
    """Bit for bit: no threshold anywhere depends on the unit of the tokens."""
    conditioner = kind(solver=solver, floor=floor)
    assert torch.equal(conditioner(X * 2.0**power), conditioner(X) * 2.0**power)


@examples(30)
@given(batches(scales=(0, 0)), st.sampled_from(SOLVERS), floors, seeds)
def test_memory_layout_does_not_matter(X, solver, floor, seed):
    conditioner = TokenConditioner(solver=solver, floor=floor)
    Y = conditioner(X)
    batch, count, width = X.shape
    wide = torch.full((batch, 2 * count, 3 * width), math.nan)
    wide[:, ::2, 1::3] = X
    shifted = torch.cat([X.new_zeros(1), X.flatten()])[1:].view_as(X)
    layouts = [
        X.mT.contiguous().mT,
        X.transpose(0, 1).contiguous().transpose(0, 1),
        wide[:, ::2, 1::3],
        shifted,
    ]
    for layout in layouts:
        assert relative_error(conditioner(layout), Y) <= 1e-5 if Y.any() else True
    one = X[:1].expand(3, -1, -1)
    torch.testing.assert_close(conditioner(one), conditioner(one.contiguous()))


@examples(40)
@given(
    batches(DTYPES),
    st.sampled_from([TokenConditioner, ScaleControl]),
    st.sampled_from(SOLVERS),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([1e-30, 1.0, 1e4, 1e30]),
    seeds,
)
def test_invalid_tokens_neither_change_nor_count(X, kind, solver, floor, garbage, seed):
    conditioner = kind(solver=solver, floor=floor)
    valid = masks(X, seed)
    assume(math.isfinite(torch.tensor(garbage, dtype=X.dtype)))
    noise = torch.from_numpy(np.random.default_rng(seed).normal(size=X.shape))
    filled = torch.where(valid[..., None], X, (garbage * noise.clamp(-1, 1)).to(X))
    Y = conditioner(filled, valid)
    assert torch.equal(Y[~valid], filled[~valid])
    clean = conditioner(torch.where(valid[..., None], X, 0), valid)
    assert torch.equal(Y[valid], clean[valid])


@examples(30)
@given(
    batches([torch.float16, torch.float32]),
    st.sampled_from([TokenConditioner, ScaleControl]),
    st.sampled_from(SOLVERS),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    seeds,
)
def test_bad_images_pass_through(X, kind, solver, floor, bad, seed):
    conditioner = kind(solver=solver, floor=floor)
    clean = conditioner(X)
    rng = np.random.default_rng(seed)
    image, token, channel = (int(rng.integers(side)) for side in X.shape)
    X[image, token, channel] = bad
    Y = conditioner(X)
    torch.testing.assert_close(Y[image], X[image], rtol=0, atol=0, equal_nan=True)
    others = torch.arange(len(X)) != image
    assert torch.equal(Y[others], clean[others])


@examples(60)
@given(
    batches([torch.float32, torch.bfloat16, torch.float64], ill=6, largest=12),
    st.sampled_from(SOLVERS),
    st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
    st.sampled_from(GRADS),
    st.booleans(),
    seeds,
)
def test_gradients_are_finite(X, solver, floor, grad, rescale, seed):
    conditioner = TokenConditioner(2.0, solver, floor, grad=grad, rescale=rescale)
    X.requires_grad_()
    Y = conditioner(X, masks(X, seed))
    assert Y.isfinite().all()
    Y.sum().backward()
    assert X.grad.isfinite().all()


@examples(40)
@given(batches(DTYPES), st.sampled_from([None, 1e-6, 1e-3, 0.5]), seeds)
def test_condition_number_is_that_of_numpy(X, rtol, seed):
    valid = masks(X, seed)
    kappa, rank = condition_number(X, valid, rtol)
    edge = default_rtol(X.dtype) if rtol is None else rtol
    for index, (x, mask) in enumerate(zip(X.double().numpy(), valid, strict=True)):
        values = np.linalg.svd(x[mask.numpy()], compute_uv=False)
        if not mask.any() or values[0] == 0:
            assert (kappa[index], rank[index]) == (1, 0)
            continue
        ratios = values / values[0]
        if ((ratios > edge / 4) & (ratios < 4 * edge)).any():
            continue
        inside = ratios[ratios > edge]
        assert rank[index] == len(inside)
        assert kappa[index].item() == pytest.approx(1 / inside[-1], rel=1e-3)


@st.composite
def padded_images(draw):
    """Images (B, C, H, W) padded at the bottom and on the right, and their sizes."""
    channels, stride = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    sizes = draw(
        st.lists(
            st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3
        )
    )
    divisor = draw(st.sampled_from([1, 2, 32]))
    height, width = (-(-max(side) // divisor) * divisor for side in zip(*sizes))  # noqa: B905
    pad = draw(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=1))
    pad = pad * channels if draw(st.booleans()) else pad
    generator = torch.Generator().manual_seed(draw(seeds) % 2**31)
    images = torch.tensor(pad).view(1, -1, 1, 1).repeat(len(sizes), 1, height, width)
    images = images.expand(-1, channels, -1, -1).clone()
    for image, (rows, columns) in zip(images, sizes, strict=True):
        noise = torch.randn(channels, rows, columns, generator=generator)
        # The last row and column hold image, and the rest is sometimes the pad value.
        noise[:, :-1, :-1] *= draw(st.sampled_from([0.0, 1.0]))
        noise += 5 * (noise != 0)
        image[:, :rows, :columns] += noise
    return images, sizes, stride, pad[0] if len(pad) == 1 else pad


@examples(60)
@given(padded_images(), st.sampled_from(['plain', 'last', 'transposed', 'strided']))
def test_padding_is_what_a_loop_finds(case, layout):
    images, sizes, stride, pad = case
    layouts = dict(
        plain=images,
        last=images.contiguous(memory_format=torch.channels_last),
        transposed=images.mT.contiguous().mT,
        strided=images.repeat_interleave(2, 3)[..., ::2],
    )
    grid = tuple(-(-side // stride) for side in images.shape[2:])
    mask = valid_tokens(layouts[layout], grid, pad, (stride, stride))
    for found, (rows, columns) in zip(mask.view(-1, *grid), sizes, strict=True):
        for row in range(grid[0]):
            for column in range(grid[1]):
                inside = row * stride < rows and column * stride < columns
                assert found[row, column] == inside


class Embed(nn.Module):
    """A patch embedding that pads at the bottom and on the right, as all do."""

    def __init__(self, stride):
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(3, 8, stride, stride)

    def forward(self, images):
        height, width = (-side % self.stride for side in images.shape[2:])
        return self.conv(nn.functional.pad(images, (0, width, 0, height)))


class Backbone(nn.Module):
    def __init__(self, stride):
        super().__init__()
        self.patch_embed = Embed(stride)

    def forward(self, images):
        return self.patch_embed(images)


@examples(40)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.sampled_from([-2.0, 0.0]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
    seeds,
)
@example([(1, 1)], 8, 0.0, torch.float32, False, 0)
def test_attached_conditioner_sees_the_image_alone(
    sizes, stride, pad, dtype, last, seed
):
    generator = torch.Generator().manual_seed(seed % 2**31)
    images = batch_images(
        [torch.randn(3, *size, generator=generator) + 9 for size in sizes], 32, pad
    )
    backbone = Backbone(stride)
    stock = backbone(images)
    attach_conditioner(backbone, TokenConditioner(floor=0.1, pad_value=pad))
    if last:
        images = images.contiguous(memory_format=torch.channels_last)
    out = backbone.to(dtype)(images.to(dtype))
    assert (out.dtype, out.shape) == (dtype, stock.shape)
    tolerance = 1e-4 + 8 * torch.finfo(dtype).eps
    for tokens, conditioned, size in zip(stock, out, sizes, strict=True):
        rows, columns = (-(-side // stride) for side in size)
        inside = tokens[:, :rows, :columns].flatten(1).T.detach()
        expected = stock.new_tensor(reference(inside, floor=0.1))
        found = conditioned[:, :rows, :columns].flatten(1).T
        assert relative_error(found.float(), expected) < tolerance
        beside = conditioned[:, rows:].float(), tokens[:, rows:]
        torch.testing.assert_close(*beside, rtol=tolerance, atol=tolerance)
