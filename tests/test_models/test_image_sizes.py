"""Any size of image, from one pixel on, through every backbone."""

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from condtok_mm.models import CondTok, CondTokSwinTransformer, CondTokViT, CondTokXCiT

from ..conftest import randomise

CONDITIONER = dict(floor=0.1)
SWIN = dict(
    embed_dims=8,
    depths=(2, 2),
    num_heads=(1, 2),
    strides=(4, 2),
    out_indices=(0, 1),
    window_size=3,
)
BUILDERS = dict(
    swin=lambda: CondTokSwinTransformer(**SWIN, conditioner=CONDITIONER),
    vit=lambda: CondTokViT(
        arch=dict(embed_dims=16, num_layers=2, num_heads=2),
        img_size=32,
        patch_size=8,
        window_size=3,
        use_rel_pos=True,
        conditioner=CONDITIONER,
    ),
    xcit=lambda: CondTokXCiT(
        arch=dict(embed_dims=16, depth=4, num_heads=2, layer_scale_init_value=1.0),
        img_size=32,
        out_indices=(0, 1, 2, 3),
        conditioner=CONDITIONER,
    ),
    stock=lambda: CondTok(
        dict(
            type='PyramidVisionTransformer',
            embed_dims=8,
            num_stages=2,
            num_layers=[1, 1],
            num_heads=[1, 1],
            patch_sizes=[4, 2],
            strides=[4, 2],
            paddings=['corner', 'corner'],
            sr_ratios=[1, 1],
            mlp_ratios=[1, 1],
            out_indices=(0, 1),
            pretrain_img_size=32,
        ),
        conditioner=CONDITIONER,
    ),
)
STRIDES = dict(swin=(4, 8), vit=(8,), stock=(4, 8))


def expected_sizes(name, height, width):
    """Rows and columns of each level, all rounded up."""
    if name == 'xcit':
        rows, columns = -(-height // 16), -(-width // 16)
        halved = (-(-rows // 2), -(-columns // 2))
        scales = [(factor * rows, factor * columns) for factor in (4, 2, 1)]
        return [*scales, halved]
    return [(-(-height // s), -(-width // s)) for s in STRIDES[name]]


@pytest.fixture(scope='module', params=BUILDERS)
def named(request):
    torch.manual_seed(0)
    return request.param, randomise(BUILDERS[request.param]()).eval()


sides = st.one_of(st.integers(1, 9), st.integers(10, 130))


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(1, 3), sides, sides, st.booleans(), st.sampled_from([1.0, 0.0]))
@example(1, 1, 1, False, 1.0)
@example(2, 1, 130, True, 1.0)
@example(2, 130, 1, False, 0.0)
@torch.no_grad()
def test_every_level_is_finite_and_covers_the_image(
    named, batch, height, width, channels_last, content
):
    name, model = named
    images = content * torch.randn(batch, 3, height, width)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    levels = model(images)
    assert all(level.isfinite().all() for level in levels)
    sizes = [tuple(level.shape[2:]) for level in levels]
    assert sizes == expected_sizes(name, height, width)
    for index in range(batch):
        alone = model(images[index : index + 1])
        for level, own in zip(levels, alone, strict=True):
            torch.testing.assert_close(level[index], own[0], rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_large_image():
    model = CondTokSwinTransformer(
        **SWIN | dict(depths=(1, 1)), conditioner=CONDITIONER
    ).eval()
    levels = model(torch.randn(1, 3, 2000, 3000))
    assert [level.shape[2:] for level in levels] == [(500, 750), (250, 375)]
    assert all(level.isfinite().all() for level in levels)
