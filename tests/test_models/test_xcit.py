import copy
import io

import pytest
import torch
import torch.distributed as dist
from mmdet.registry import MODELS
from mmengine.model import convert_sync_batchnorm
from mmpretrain.models import XCiT
from torch.nn.parallel import DistributedDataParallel

from condtok_mm.conditioning import condition_number
from condtok_mm.conditioning.attach import conditioned_layer
from condtok_mm.conditioning.conditioner import GRADS
from condtok_mm.models import CondTokXCiT

from ..conftest import batch_images, photograph, randomise, reference, relative_error

ARCH = dict(embed_dims=48, depth=4, num_heads=4, layer_scale_init_value=1.0)
BLOCKS = (0, 1, 2, 3)
LEVEL_KEYS = {
    16: {
        'levels.0.0.weight',
        'levels.0.0.bias',
        'levels.0.1.weight',
        'levels.0.1.bias',
        'levels.0.1.running_mean',
        'levels.0.1.running_var',
        'levels.0.1.num_batches_tracked',
        'levels.0.3.weight',
        'levels.0.3.bias',
        'levels.1.weight',
        'levels.1.bias',
    },
    8: {'levels.0.weight', 'levels.0.bias'},
}


def build(**kwargs):
    model = CondTokXCiT(**(dict(arch=ARCH, out_indices=BLOCKS) | kwargs))
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith('running_mean'):
            buffer.normal_(std=0.1)
    return model.eval()


def batch_norms(model):
    return [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]


def stock_twin(model, **kwargs):
    stock = XCiT(**ARCH, out_type='featmap', out_indices=BLOCKS, **kwargs)
    state = {k: v for k, v in model.state_dict().items() if not k.startswith('levels.')}
    stock.load_state_dict(state, strict=True)
    stock.eval()
    return stock


@pytest.mark.parametrize('patch_size', [16, 8])
@pytest.mark.parametrize('size', [(64, 96), (75, 121)], ids=str)
def test_blocks_are_bit_identical_to_stock(size, patch_size):
    model = build(patch_size=patch_size)
    stock = stock_twin(model, patch_size=patch_size)
    images = torch.randn(2, 3, *size)
    for training in (False, True):
        for each in (model, stock):
            each.train(training)
        with torch.no_grad():
            blocks = stock(images)
            levels = model(images)
            for block, level, layer in zip(blocks, levels, model.levels, strict=True):
                assert block.shape[2:] == tuple(-(-side // patch_size) for side in size)
                assert torch.equal(level, layer(block))


@pytest.mark.parametrize('patch_size', [16, 8])
def test_only_the_levels_are_new_keys(patch_size):
    model = build(patch_size=patch_size, conditioner=dict())
    stock = XCiT(**ARCH, patch_size=patch_size)
    assert set(model.state_dict()) - set(stock.state_dict()) == LEVEL_KEYS[patch_size]
    assert set(stock.state_dict()) < set(model.state_dict())
    result = model.load_state_dict(stock.state_dict(), strict=False)
    assert all(name.startswith('levels.') for name in result.missing_keys)
    assert not result.unexpected_keys


@pytest.mark.parametrize('patch_size', [16, 8])
@pytest.mark.parametrize('size', [(64, 96), (75, 121), (1, 1), (16, 40)], ids=str)
def test_strides(size, patch_size):
    model = build(patch_size=patch_size, conditioner=dict())
    grid = [-(-side // patch_size) for side in size]
    with torch.no_grad():
        levels = model(torch.randn(2, 3, *size))
    for stride, level in zip((4, 8, 16, 32), levels, strict=True):
        sides = [-(-side * patch_size // stride) for side in grid]
        assert level.shape == (2, 48, *sides)
        assert level.isfinite().all()


def test_levels_are_those_of_the_recipe():
    for arch, blocks in (('small-12', (3, 5, 7, 11)), ('medium-24', (7, 11, 15, 23))):
        with torch.device('meta'):
            model = CondTokXCiT(arch)
        assert model.out_indices == blocks
    assert model.xca_layers[0].attn.num_heads == 8
    assert model.embed_dims == 512


def test_every_trainable_parameter_gets_a_gradient():
    model = build(conditioner=dict(floor=0.1), out_indices=(0, 1, 2, 3)).train()
    sum(out.square().sum() for out in model(torch.randn(2, 3, 64, 80))).backward()
    for name, parameter in model.named_parameters():
        unused = name.startswith(('cls_token', 'ca_layers.', 'norm.'))
        assert parameter.requires_grad != unused, name
        if unused:
            assert parameter.grad is None, name
        else:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name


def test_data_parallel_training_finds_no_unused_parameter(tmp_path):
    """The reducer complains in the second step about parameters without gradient."""
    dist.init_process_group(
        'gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1
    )
    try:
        model = DistributedDataParallel(build(conditioner=dict(floor=0.1)).train())
        for _ in range(2):
            levels = model(torch.randn(2, 3, 64, 64))
            sum(level.square().sum() for level in levels).backward()
    finally:
        dist.destroy_process_group()


def test_blocks_behind_the_last_level_are_neither_run_nor_trained():
    model = build(arch=ARCH | dict(depth=6), out_indices=(0, 1, 2, 3)).train()
    run = []
    for index, layer in enumerate(model.xca_layers):
        layer.register_forward_hook(lambda *_, index=index: run.append(index))
    model(torch.randn(1, 3, 64, 64))
    assert run == [0, 1, 2, 3]
    trained = [
        any(parameter.requires_grad for parameter in layer.parameters())
        for layer in model.xca_layers
    ]
    assert trained == [True] * 4 + [False] * 2


@pytest.mark.parametrize('frozen_stages', [-1, 0, 2, 4])
def test_frozen_stages(frozen_stages):
    model = build(frozen_stages=frozen_stages, drop_rate=0.1)
    assert model.train() is model
    assert model.eval() is model
    model.train()
    for name, parameter in model.named_parameters():
        frozen = name.startswith(('cls_token', 'ca_layers.', 'norm.'))
        if name.startswith(('patch_embed.', 'pos_embed.')):
            frozen = frozen_stages >= 0
        if name.startswith('xca_layers.'):
            frozen = int(name.split('.')[1]) < frozen_stages
        assert parameter.requires_grad != frozen, name
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(2, 3, 64, 64))
    for name, value in model.state_dict().items():
        if name.endswith('running_mean'):
            first = name.split('.')
            frozen = first[0] == 'patch_embed' and frozen_stages >= 0
            if first[0] == 'xca_layers':
                frozen = int(first[1]) < frozen_stages
            assert torch.equal(value, before[name]) == frozen, name


def test_checkpointing_gives_the_same_gradients_and_statistics():
    images = torch.randn(2, 3, 64, 64)
    state = build().state_dict()
    gradients, statistics = [], []
    for with_cp in (False, True):
        model = build(with_cp=with_cp, drop_path_rate=0.3).train()
        model.load_state_dict(state)
        torch.manual_seed(1)
        sum(out.square().sum() for out in model(images)).backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
        statistics.append(
            [v for name, v in model.named_buffers() if 'running_' in name]
        )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(*statistics, strict=True):
        assert torch.equal(one, other)
    assert all(norm.momentum == 0.1 for norm in batch_norms(model))


@pytest.mark.parametrize('patch_size', [16, 8])
def test_condition_number_of_a_photograph(patch_size):
    model = CondTokXCiT(patch_size=patch_size, conditioner=dict(kappa=2.0, floor=0.0))
    image = photograph(352, 512)[None]
    with torch.no_grad():
        model.train().patch_embed(image)
        model.eval()
        Y = model.patch_embed(image)[0]
        model.conditioner.strength = 0
        X = model.patch_embed(image)[0]
    kappa, rank = condition_number(X)
    assert kappa.item() > 100
    values = torch.linalg.svdvals(Y[0].double())
    assert values[0] / values[rank.item() - 1] <= 2.02
    assert relative_error(Y[0], reference(X[0])) < 1e-2


@pytest.mark.parametrize('grad', GRADS)
def test_gradient_of_an_image_is_its_share_of_a_batch(grad):
    """Batch norms with fixed statistics, so that images do not depend on each other."""
    model = build(conditioner=dict(floor=0.1, grad=grad))
    images = torch.stack([photograph(64, 64, seed) for seed in range(2)])
    shares = torch.randn(2, 16, 48)
    found = []
    for parts in ((slice(0, 2),), (slice(0, 1), slice(1, 2))):
        model.zero_grad()
        for part in parts:
            (model.patch_embed(images[part])[0] * shares[part]).sum().backward()
        found.append([p.grad.clone() for p in model.patch_embed.parameters()])
    for whole, summed in zip(*found, strict=True):
        assert relative_error(summed, whole) < 1e-4


@pytest.mark.parametrize('divisor', [1, 32])
@pytest.mark.parametrize('patch_size', [16, 8])
def test_padding_stays_out_of_the_statistics(patch_size, divisor):
    """In a batch of two shapes, each image's valid tokens have their own C."""
    model = build(patch_size=patch_size, conditioner=dict(floor=0.1))
    photos = [photograph(203, 331, 1), photograph(301, 211, 2)]
    images = batch_images(photos, divisor)
    with torch.no_grad():
        conditioned, grid = model.patch_embed(images)
        model.conditioner.strength = 0
        stock = model.patch_embed(images)[0]
    _, valid = conditioned_layer(model).forward.tokens(images, (stock, grid))
    for photo, mask, after, before in zip(
        photos, valid, conditioned, stock, strict=True
    ):
        rows, columns = (-(-side // patch_size) for side in photo.shape[1:])
        expected = torch.zeros(grid, dtype=torch.bool)
        expected[:rows, :columns] = True
        assert torch.equal(mask, expected.flatten())
        assert relative_error(after[mask], reference(before[mask], floor=0.1)) < 1e-4
        assert torch.equal(after[~mask], before[~mask])


def test_pixels_of_one_image_leave_the_features_of_another_bit_identical():
    model = build(conditioner=dict(floor=0.1))
    images = batch_images([photograph(96, 128, 1), photograph(128, 70, 2)])
    changed = images.clone()
    changed[0, :, :96, :128] = photograph(96, 128, 3)
    with torch.no_grad():
        for before, after in zip(model(images), model(changed), strict=True):
            assert torch.equal(before[1], after[1])
            assert not torch.equal(before[0], after[0])


def test_autocast_computes_tokens_in_float32():
    model = build(conditioner=dict())
    stock = build()
    image = photograph(128, 160)[None]
    with torch.no_grad():
        exact, _ = model.patch_embed(image)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            tokens, _ = model.patch_embed(image)
            assert tokens.dtype == stock.patch_embed(image)[0].dtype
            features = model(image)
            assert [f.dtype for f in features] == [f.dtype for f in stock(image)]
    assert relative_error(tokens.double(), exact) < 1e-2
    assert all(feature.isfinite().all() for feature in features)


def test_deepcopy_and_pickle():
    model = build(conditioner=dict(floor=0.1))
    images = torch.randn(1, 3, 64, 64)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twins = [copy.deepcopy(model), torch.load(stream, weights_only=False)]
    with torch.no_grad():
        expected = model(images)
        for twin in twins:
            assert conditioned_layer(twin).forward.layer is twin.patch_embed
            for mine, theirs in zip(twin(images), expected, strict=True):
                assert torch.equal(mine, theirs)


def test_pretrained_weights_load_from_a_file(tmp_path):
    """Those of mmpretrain's classifier, class attention included."""
    source = randomise(XCiT(**ARCH))
    source.patch_embed.proj[0].bn.running_mean.normal_()
    path = tmp_path / 'xcit.pth'
    torch.save(dict(state_dict=source.state_dict()), path)
    init_cfg = dict(type='Pretrained', checkpoint=str(path))
    model = build(init_cfg=init_cfg)
    model.init_weights()
    state = model.state_dict()
    for name, value in source.state_dict().items():
        assert torch.equal(state[name], value), name


def test_sync_bn_of_the_recipe_keeps_the_conditioner_and_what_is_frozen():
    model = build(conditioner=dict(floor=0.1), frozen_stages=1)
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(images)
        model = convert_sync_batchnorm(model)
        assert not batch_norms(model)
        for mine, theirs in zip(model.eval()(images), expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    norm = model.train().patch_embed.proj[0].bn
    assert not norm.training
    assert not norm.weight.requires_grad


@pytest.mark.parametrize('scope', ['mmdet', 'mmpretrain', 'mmengine'])
def test_is_registered(scope):
    cfg = dict(type='CondTokXCiT', arch=ARCH, out_indices=BLOCKS)
    if scope != 'mmengine':
        cfg['type'] = f'{scope}.CondTokXCiT'
    assert type(MODELS.build(cfg)) is CondTokXCiT


@pytest.mark.parametrize(
    ('kwargs', 'words'),
    [
        (dict(arch='huge'), 'tiny-12, small-12, small-24, medium-24'),
        (dict(out_indices=(0, 1, 2)), r'4 integers in \[0, 3\].*\(0, 1, 2\)'),
        (dict(out_indices=(0, 1, 3, 2)), 'in order'),
        (dict(out_indices=(1, 2, 3, 4)), r'in \[0, 3\]'),
        (dict(out_indices=(0, 1, 2, -1)), r'in \[0, 3\]'),
        (dict(out_indices=None), r'got \(0, 1, 1, 3\)'),
        (dict(frozen_stages=5), r'frozen_stages must be .* in \[-1, 4\], but got 5'),
        (dict(patch_size=32), '16 or 8'),
    ],
)
def test_bad_arguments_raise(kwargs, words):
    with pytest.raises(ValueError, match=words):
        build(**kwargs)
