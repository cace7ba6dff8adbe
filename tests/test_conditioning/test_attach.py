import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from condtok_mm.conditioning import (
    TokenConditioner,
    attach_conditioner,
    condition_number,
    detach_conditioner,
    valid_tokens,
)
from condtok_mm.conditioning.attach import ieee_fp32

from ..conftest import batch_images, photograph, relative_error


class Embed(nn.Module):
    """A patch embedding that returns what is asked for."""

    def __init__(self, returns):
        super().__init__()
        self.projection = nn.Conv2d(3, 12, 8, 8)
        self.returns = returns

    def forward(self, images):
        out = self.projection(images)
        tokens = out.flatten(2).mT
        return {
            'tuple': lambda: (tokens, tuple(out.shape[2:])),
            'list': lambda: [tokens, torch.Size(out.shape[2:]), 'more'],
            'numbers': lambda: (tokens, *out.shape[2:]),
            'grid first': lambda: (tuple(out.shape[2:]), tokens),
            'map': lambda: out,
            'map and grid': lambda: (out, tuple(out.shape[2:])),
            'last': lambda: out.permute(0, 2, 3, 1),
            'tokens': lambda: tokens,
            'unnamed': lambda: (tokens, 'more'),
            'windows': lambda: tokens.unflatten(1, (-1, 2, 2)),
            'class token': lambda: torch.cat((tokens[:, :1], tokens), 1),
            'wrong grid': lambda: (tokens, (1, 2)),
            'pooled': lambda: out.mean((2, 3)),
        }[self.returns]()


class Backbone(nn.Module):
    def __init__(self, returns='tuple'):
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(Embed(returns)), nn.Identity()])

    def forward(self, images):
        return self.stages(images)


EMBED = 'stages.0.0'


def tokens_of(output):
    """Tokens (B, N, 12), whatever they are in."""
    if isinstance(output, tuple | list):
        output = next(part for part in output if torch.is_tensor(part))
    if output.dim() == 4 and output.shape[1] == 12:
        output = output.movedim(1, -1)
    return output.flatten(1, -2)


RETURNS = (
    'tuple',
    'list',
    'numbers',
    'grid first',
    'map',
    'map and grid',
    'last',
    'tokens',
    'unnamed',
    'windows',
)


@pytest.mark.parametrize('returns', RETURNS)
def test_every_kind_of_output(returns):
    backbone = Backbone(returns)
    layer = backbone.stages[0][0]
    images = batch_images([photograph(64, 96, 1), photograph(96, 70, 2)])
    before = layer(images)
    pad_value = None if returns == 'windows' else 0.0
    conditioner = TokenConditioner(floor=0.1, pad_value=pad_value)
    assert attach_conditioner(backbone, conditioner, EMBED) is backbone
    after = backbone.stages[0](images)
    assert type(after) is type(before)
    if torch.is_tensor(before):
        assert after.shape == before.shape
    valid = None
    if pad_value is not None:
        valid = valid_tokens(images, (images.shape[2] // 8, images.shape[3] // 8), 0.0)
        assert not valid.all()
    torch.testing.assert_close(
        tokens_of(after), TokenConditioner(floor=0.1)(tokens_of(before), valid)
    )
    if returns == 'list':
        assert after[1:] == before[1:]
    detach_conditioner(backbone)
    torch.testing.assert_close(
        tokens_of(layer(images)), tokens_of(before), rtol=0, atol=0
    )


def test_attach_and_detach_leave_nothing_behind():
    backbone = Backbone()
    layer = backbone.stages[0][0]
    names = list(backbone.state_dict())
    attributes = set(vars(backbone)), set(vars(layer))
    attach_conditioner(backbone, TokenConditioner(), EMBED)
    assert list(backbone.state_dict()) == names
    assert type(layer) is Embed
    assert dict(backbone.named_children()).keys() == {'stages', 'conditioner'}
    detach_conditioner(backbone)
    assert (set(vars(backbone)), set(vars(layer))) == attributes
    assert dict(backbone.named_children()).keys() == {'stages'}


@pytest.mark.parametrize(
    ('returns', 'words'),
    [
        ('windows', 'returns 16 tokens and no grid.*set pad_value=None'),
        ('class token', 'returns 17 tokens and no grid.*set pad_value=None'),
        ('wrong grid', 'returns 16 tokens and a grid of 1 x 2.*set pad_value=None'),
        ('pooled', r'this one returns \(1, 12\); name another layer'),
    ],
)
def test_output_without_a_grid_is_explained(returns, words):
    backbone = attach_conditioner(Backbone(returns), TokenConditioner(), EMBED)
    with pytest.raises(ValueError, match=words):
        backbone.stages[0](torch.randn(1, 3, 32, 32))


class Unfolded(nn.Unfold):
    """An embedding without a convolution."""

    def forward(self, images):
        return super().forward(images).mT


def test_grid_from_the_strides_of_an_unfold():
    backbone = Backbone()
    layer = backbone.stages[0][0] = Unfolded(8, stride=8)
    attach_conditioner(backbone, TokenConditioner(floor=0.1), EMBED)
    image = photograph(64, 96)
    padded = batch_images([image, torch.zeros(3, 96, 128)])
    tokens = layer(padded)[0].reshape(12, 16, 192)
    torch.testing.assert_close(
        tokens[:8, :12].flatten(0, 1), layer(image[None])[0], rtol=1e-4, atol=1e-4
    )
    assert not tokens[8:].any()


def test_strength_zero_is_the_stock_layer():
    backbone = Backbone()
    images = torch.randn(2, 3, 32, 32)
    before = backbone.stages[0](images)[0]
    attach_conditioner(backbone, TokenConditioner(), EMBED)
    backbone.conditioner.strength = 0
    assert torch.equal(backbone.stages[0](images)[0], before)


def test_a_copied_average_has_its_own_conditioner():
    """EMAHook copies the model; its conditioner must not be the one that trains."""
    from mmengine.model import ExponentialMovingAverage

    backbone = attach_conditioner(Backbone(), TokenConditioner(floor=0.1), EMBED)
    average = ExponentialMovingAverage(backbone, momentum=0.5).module
    assert average.conditioner is not backbone.conditioner
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        backbone.stages[0][0].projection.weight.mul_(2)
    expected = tokens_of(copy.deepcopy(average).stages[0](images))
    backbone.conditioner.strength = 0
    assert torch.equal(tokens_of(average.stages[0](images)), expected)


@pytest.mark.parametrize(
    ('embed', 'words'),
    [
        ('patch_embed', "Backbone has no layer 'patch_embed'; its children: stages"),
        ('', 'no layer'),
    ],
)
def test_unknown_layer_is_named(embed, words):
    with pytest.raises(ValueError, match=words):
        attach_conditioner(Backbone(), TokenConditioner(), embed)


def test_wrong_use_raises():
    backbone = Backbone()
    with pytest.raises(TypeError, match=r"TokenConditioner, but got \{'kappa'"):
        attach_conditioner(backbone, dict(kappa=2.0), EMBED)
    with pytest.raises(ValueError, match='Backbone has no conditioner attached'):
        detach_conditioner(backbone)
    attach_conditioner(backbone, TokenConditioner(), EMBED)
    with pytest.raises(ValueError, match='has a conditioner already'):
        attach_conditioner(backbone, TokenConditioner(), EMBED)
    detach_conditioner(backbone)
    backbone.stages[0][0].forward = print
    with pytest.raises(ValueError, match='has been replaced on the instance'):
        attach_conditioner(backbone, TokenConditioner(), EMBED)


def test_tf32_flags_are_off_inside_and_restored():
    backends = torch.backends
    new_api = hasattr(backends.cudnn, 'conv')

    def flags():
        if new_api:
            owners = (backends.cudnn.conv, backends.cuda.matmul)
            return [owner.fp32_precision for owner in owners]
        return [backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32]

    before = flags()
    with pytest.raises(RuntimeError, match='inside'), ieee_fp32():
        assert flags() == (['ieee', 'ieee'] if new_api else [False, False])
        raise RuntimeError('inside')
    assert flags() == before


def test_tf32_flags_survive_threads():
    def use(_):
        for _ in range(200):
            with ieee_fp32():
                pass

    owner = getattr(torch.backends.cudnn, 'conv', torch.backends.cudnn)
    name = 'fp32_precision' if hasattr(owner, 'fp32_precision') else 'allow_tf32'
    before = getattr(owner, name)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
    assert getattr(owner, name) == before


@pytest.mark.parametrize('patch', [7, 14])
def test_batch_mates_do_not_matter_for_odd_patches(patch):
    backbone = Backbone()
    layer = backbone.stages[0][0]
    layer.projection = nn.Conv2d(3, 12, patch, patch)
    attach_conditioner(backbone, TokenConditioner(floor=0.1), EMBED)
    image = photograph(3 * patch, 6 * patch)
    padded = torch.zeros(1, 3, 6 * patch, 6 * patch)
    padded[0, :, : 3 * patch] = image
    alone, batched = layer(image[None])[0], layer(padded)[0]
    torch.testing.assert_close(batched[:, : alone.shape[1]], alone)


def test_tokens_that_overflow_the_output_dtype_stay_as_embedded():
    backbone = Backbone()
    attach_conditioner(backbone, TokenConditioner(kappa=1 + 1e-6), EMBED)
    images = photograph(64, 64)[None]
    with torch.autocast('cpu', dtype=torch.float16):
        tokens = tokens_of(backbone.stages[0](images))
    assert tokens.dtype == torch.float16
    assert tokens.isfinite().all()


def test_old_style_weight_norm_under_autocast():
    backbone = Backbone()
    layer = backbone.stages[0][0]
    with pytest.warns(FutureWarning, match='weight_norm'):
        nn.utils.weight_norm(layer.projection)
    attach_conditioner(backbone, TokenConditioner(floor=0.1), EMBED)
    images = photograph(64, 64)[None]
    exact = tokens_of(layer(images))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        tokens = tokens_of(layer(images))
        tokens.float().sum().backward()
    assert relative_error(tokens.double(), exact.detach()) < 1e-2
    assert layer.projection.weight_v.grad.abs().sum() > 0


def test_conditioned_tokens_reach_the_bound():
    backbone = attach_conditioner(Backbone(), TokenConditioner(), EMBED)
    tokens = tokens_of(backbone.stages[0](photograph(96, 96)[None]))
    assert condition_number(tokens)[0].item() <= 2.02
