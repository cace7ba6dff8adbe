import pytest
import torch
from mmpretrain.models import VisionTransformer, ViTSAM

from condtok_mm.models import CondTokViT

from ..conftest import photograph, randomise, relative_error

ARCH = dict(
    embed_dims=48,
    num_layers=4,
    num_heads=3,
    feedforward_channels=96,
    global_attn_indexes=(1, 3),
)
SHARED = dict(img_size=64, patch_size=8, window_size=3, out_indices=(0, 1, 2, 3))


def build(**kwargs):
    model = CondTokViT(**(dict(arch=ARCH, **SHARED) | kwargs))
    return randomise(model).eval()


@pytest.mark.parametrize('use_rel_pos', [True, False])
@pytest.mark.parametrize('size', [(64, 64), (96, 96), (64, 120), (83, 41)], ids=str)
def test_parity_with_vitsam(size, use_rel_pos):
    model = build(use_rel_pos=use_rel_pos)
    stock = ViTSAM(
        arch=ARCH,
        out_channels=0,
        norm_cfg=dict(type='LN', eps=1e-6),
        use_rel_pos=use_rel_pos,
        **SHARED,
    )
    stock.load_state_dict(model.state_dict(), strict=True)
    stock.eval()
    images = torch.randn(2, 3, *size)
    with torch.no_grad():
        for mine, theirs in zip(model(images), stock(images), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('arch', ['tiny', 'small', 'base', 'large'])
def test_presets(arch):
    with torch.device('meta'):
        model = CondTokViT(arch=arch)
    windows = [layer.window_size for layer in model.layers]
    depth = model.num_layers
    assert [i for i, size in enumerate(windows) if not size] == [
        depth // 4 - 1,
        depth // 2 - 1,
        3 * depth // 4 - 1,
        depth - 1,
    ]
    assert model.layers[0].attn.qkv.in_features == model.embed_dims
    assert model.embed_dims // model.layers[0].attn.num_heads == 64


@pytest.mark.parametrize('with_cls_token', [True, False])
@pytest.mark.parametrize('img_size', [64, (96, 160)], ids=str)
def test_loads_mmpretrain_checkpoints(with_cls_token, img_size):
    """Position embeddings of 4 x 4 patches, with and without a class token."""
    source = VisionTransformer(
        arch={k: v for k, v in ARCH.items() if k != 'global_attn_indexes'},
        img_size=32,
        patch_size=8,
        with_cls_token=with_cls_token,
        out_type='featmap' if not with_cls_token else 'cls_token',
        final_norm=False,
    )
    randomise(source)
    model = build(img_size=img_size)
    missing, unexpected = model.load_state_dict(source.state_dict(), strict=False)
    assert not missing
    assert unexpected == ['cls_token'] * with_cls_token
    patches = source.pos_embed[:, int(with_cls_token) :].detach().view(1, 4, 4, 48)
    assert (
        model.pos_embed.shape[1:3]
        == model.patch_embed(
            torch.zeros(
                1,
                3,
                *(img_size if isinstance(img_size, tuple) else (img_size, img_size)),
            )
        )[1]
    )
    expected = torch.nn.functional.interpolate(
        patches.permute(0, 3, 1, 2), model.pos_embed.shape[1:3], mode='bicubic'
    )
    torch.testing.assert_close(model.pos_embed.permute(0, 3, 1, 2), expected)


def test_relative_positions_are_resized_on_loading():
    source, model = build(use_rel_pos=True), build(use_rel_pos=True, img_size=128)
    model.load_state_dict(source.state_dict(), strict=True)
    table = source.layers[1].attn.rel_pos_h.detach()
    resized = model.layers[1].attn.rel_pos_h.detach()
    assert table.shape[0] == 15
    assert resized.shape[0] == 31
    torch.testing.assert_close(resized[15], table[7])


def test_checkpoint_of_another_architecture_is_named():
    state = build().state_dict()
    state['pos_embed'] = torch.zeros(1, 17, 32)
    with pytest.raises(ValueError, match='pos_embed 1x17x32 -> 1x8x8x48'):
        build(min_matched=1.0).load_state_dict(state)
    state['pos_embed'] = torch.zeros(1, 15, 48)
    with pytest.raises(ValueError, match='pos_embed 1x15x48 -> 1x8x8x48'):
        build(min_matched=1.0).load_state_dict(state)


def test_conditioner_changes_the_tokens_and_no_key():
    model, conditioned = build(), build(conditioner=dict(floor=0.1))
    conditioned.load_state_dict(model.state_dict(), strict=True)
    image = photograph(64, 96)[None]
    with torch.no_grad():
        before, grid = model.patch_embed(image)
        after, _ = conditioned.patch_embed(image)
        assert grid == (8, 12)
        assert relative_error(after, before) > 0.1
        conditioned.conditioner.strength = 0
        assert torch.equal(conditioned(image)[-1], model(image)[-1])


@pytest.mark.parametrize('use_rel_pos', [True, False])
def test_every_parameter_gets_a_gradient(use_rel_pos):
    model = build(use_rel_pos=use_rel_pos, conditioner=dict(floor=0.1)).train()
    sum(out.square().sum() for out in model(torch.randn(2, 3, 64, 80))).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_checkpointing_gives_the_same_gradients():
    images = torch.randn(2, 3, 64, 64)
    state = build().state_dict()
    gradients = []
    for with_cp in (False, True):
        model = build(with_cp=with_cp, drop_path_rate=0.3).train()
        model.load_state_dict(state)
        torch.manual_seed(1)
        model(images)[-1].square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize('frozen_stages', [-1, 0, 2, 4])
def test_frozen_stages(frozen_stages):
    model = build(frozen_stages=frozen_stages, drop_path_rate=0.3)
    assert model.train() is model
    assert model.eval() is model
    model.train()
    for name, parameter in model.named_parameters():
        frozen = frozen_stages >= 0 and not name.startswith('layers.')
        if name.startswith('layers.'):
            frozen = int(name.split('.')[1]) < frozen_stages
        assert parameter.requires_grad != frozen, name
    assert [layer.training for layer in model.layers] == [
        index >= frozen_stages for index in range(4)
    ]


def test_layer_depth():
    model = build()
    depths = {
        name: model.get_layer_depth(name, 'backbone.')[0]
        for name in (
            'backbone.pos_embed',
            'backbone.patch_embed.projection.weight',
            'backbone.layers.0.ln1.weight',
            'backbone.layers.3.ffn.layers.1.bias',
            'neck.convs.0.0.conv.weight',
        )
    }
    assert list(depths.values()) == [0, 0, 1, 4, 5]


@pytest.mark.parametrize(
    ('kwargs', 'words'),
    [
        (dict(arch='huge'), 'tiny, small, base, large'),
        (dict(arch=dict(embed_dims=48)), 'num_heads'),
        (dict(arch=ARCH | dict(depth=3)), 'depth'),
        (dict(arch=ARCH | dict(num_heads=5)), 'multiple of num_heads=5'),
        (
            dict(arch=ARCH | dict(global_attn_indexes=[7])),
            r'indexes.*\[7\]',
        ),
        (dict(out_indices=4), 'out_indices'),
        (dict(frozen_stages=5), 'frozen_stages'),
        (dict(img_size=4), 'img_size=4 is smaller than patch_size=8'),
        (dict(patch_size=0), 'patch_size must be an integer >= 1, but got 0'),
        (dict(window_size=-1), 'window_size'),
        (dict(drop_path_rate=1.0), r'drop_path_rate must lie in \[0, 1\)'),
        (dict(out_indices=(0, 0)), 'twice'),
        (dict(arch=None), 'arch must be'),
        (dict(arch=ARCH | dict(num_layers=0)), 'num_layers'),
    ],
)
def test_bad_arguments_raise(kwargs, words):
    with pytest.raises(ValueError, match=words):
        build(**kwargs)


@pytest.mark.parametrize('size', [(1, 1), (8, 200), (33, 7)], ids=str)
def test_any_image_size(size):
    model = build(use_rel_pos=True, conditioner=dict())
    out = model(torch.randn(1, 3, *size))[-1]
    assert out.shape[2:] == (-(-size[0] // 8), -(-size[1] // 8))
    assert out.isfinite().all()
