"""Fused attention against mmdet's and mmpretrain's classes, value and gradient."""

import copy
import pickle

import pytest
import torch
from mmdet.models import SwinTransformer
from mmpretrain.models import ViTSAM
from torch import nn

from condtok_mm.models import CondTokSwinTransformer, CondTokViT
from condtok_mm.models.backbones.cpu_kernels import usable
from condtok_mm.models.backbones.windows import from_windows, to_windows, window_plan

from ..conftest import randomise, relative_error

SMALL = dict(embed_dims=24, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))
VIT = dict(embed_dims=32, num_layers=4, num_heads=2)


def pair(**kwargs):
    stock = randomise(SwinTransformer(**SMALL | kwargs))
    fused = CondTokSwinTransformer(**SMALL | kwargs)
    fused.load_state_dict(stock.state_dict(), strict=True)
    assert list(fused.state_dict()) == list(stock.state_dict())
    return stock, fused


def outputs_and_gradients(model, images):
    model.zero_grad()
    torch.manual_seed(1)
    outs = model(images)
    sum((out * out.detach().roll(1, 1)).sum() for out in outs).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    return [out.detach() for out in outs], grads


def assert_same(actual, expected, tolerance=1e-4):
    for mine, theirs in zip(actual[0], expected[0], strict=True):
        assert relative_error(mine, theirs) < tolerance
    for name, theirs in expected[1].items():
        if theirs.any():
            assert relative_error(actual[1][name], theirs) < tolerance, name
        else:
            assert not actual[1][name].any(), name


@pytest.mark.parametrize(
    ('size', 'window'),
    [((64, 64), 7), ((97, 130), 7), ((224, 224), 7), ((40, 300), 5), ((9, 9), 7)],
    ids=str,
)
@pytest.mark.parametrize('batch', [1, 3])
def test_swin_is_mmdets(size, window, batch):
    stock, fused = pair(window_size=window, drop_path_rate=0.0)
    images = torch.randn(batch, 3, *size)
    expected = outputs_and_gradients(stock, images)
    assert_same(outputs_and_gradients(fused, images), expected)
    with torch.no_grad():
        for mine, theirs in zip(fused(images), expected[0], strict=True):
            assert relative_error(mine, theirs) < 1e-4


def test_stochastic_depth_drops_the_same_paths():
    stock, fused = pair(drop_path_rate=0.5)
    stock.train()
    fused.train()
    images = torch.randn(3, 3, 64, 96)
    expected = outputs_and_gradients(stock, images)
    assert_same(outputs_and_gradients(fused, images), expected)


@pytest.mark.parametrize('kwargs', [dict(with_cp=True), dict(qkv_bias=False)], ids=str)
def test_swin_with_other_options(kwargs):
    stock, fused = pair(drop_path_rate=0.0, **kwargs)
    images = torch.randn(2, 3, 64, 96)
    expected = outputs_and_gradients(stock, images)
    assert_same(outputs_and_gradients(fused, images), expected)


def test_frozen_stages_get_no_gradient():
    _, fused = pair(drop_path_rate=0.0, frozen_stages=2)
    fused.train()
    sum(out.sum() for out in fused(torch.randn(1, 3, 64, 64))).backward()
    for name, parameter in fused.named_parameters():
        assert (parameter.grad is None) == (not parameter.requires_grad), name


def watched(model):
    """The same model where every linear layer and activation must be called."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.GELU):
            module.register_forward_hook(_count)
    return model


calls = []


def _count(module, inputs, output):
    calls.append(module)


@pytest.mark.parametrize('use_rel_pos', [False, True])
def test_kernels_equal_the_plain_path(use_rel_pos):
    """Hooks on the layers, as of quantisers, turn the kernels off and are called."""
    vit = CondTokViT(VIT, img_size=64, window_size=3, use_rel_pos=use_rel_pos)
    images = torch.randn(2, 3, 83, 120)
    for model in (randomise(vit), pair(drop_path_rate=0.0)[1]):
        expected = outputs_and_gradients(model, images)
        calls.clear()
        plain = watched(model)
        assert_same(outputs_and_gradients(plain, images), expected)
        layers = [m for m in plain.modules() if isinstance(m, nn.Linear | nn.GELU)]
        assert {id(m) for m in layers} <= {id(m) for m in calls} | {
            id(m) for n, m in plain.named_modules() if n.endswith('reduction')
        }


def test_dropout_is_kept():
    _, fused = pair(drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.0)
    fused.train()
    images = torch.randn(1, 3, 64, 64)
    assert not torch.equal(fused(images)[0], fused(images)[0])
    fused.eval()
    assert torch.equal(fused(images)[0], fused(images)[0])


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    stock, fused = pair(drop_path_rate=0.0)
    images = torch.randn(2, 3, 64, 96)
    with torch.autocast('cpu', dtype=dtype):
        for mine, theirs in zip(fused(images), stock(images), strict=True):
            assert mine.dtype == theirs.dtype
            assert relative_error(mine.double(), theirs.double().detach()) < 0.03


def test_float64_and_a_second_backward_through_the_same_graph():
    stock, fused = pair(drop_path_rate=0.0)
    images = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    expected = outputs_and_gradients(stock.double(), images)
    fused.double()
    assert_same(outputs_and_gradients(fused, images), expected, 1e-10)
    loss = sum(out.square().sum() for out in fused(images))
    names = dict(fused.named_parameters())
    first = torch.autograd.grad(loss, names.values(), retain_graph=True)
    second = torch.autograd.grad(loss, names.values())
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_copies_and_pickles():
    _, fused = pair()
    fused.eval()
    images = torch.randn(1, 3, 64, 64)
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert torch.equal(twin(images)[0], fused(images)[0])


def test_inference_mode_before_training():
    _, fused = pair()
    images = torch.randn(1, 3, 72, 104)
    with torch.inference_mode():
        fused(images)
    fused(images)[0].sum().backward()


def test_a_plan_is_made_once_for_a_size():
    cpu = torch.device('cpu')
    assert window_plan(30, 40, 7, 3, cpu) is window_plan(30, 40, 7, 3, cpu)
    assert window_plan(30, 40, 7, 3, cpu) is not window_plan(31, 40, 7, 3, cpu)


@pytest.mark.parametrize('hw', [(7, 14), (1, 1), (8, 3), (20, 9)], ids=str)
@pytest.mark.parametrize('shift', [0, 3])
def test_windows_and_back(hw, shift):
    plan = window_plan(*hw, 7, shift, torch.device('cpu'))
    tokens = torch.randn(2, hw[0] * hw[1], 5)
    windows = to_windows(tokens, plan)
    assert torch.equal(from_windows(windows, plan, 2), tokens)
    total = 2 * (-(-hw[0] // 7)) * (-(-hw[1] // 7))
    assert windows.shape == (total, 49, 5)
    torch.testing.assert_close(windows.abs().sum(), tokens.abs().sum())


def test_usable_says_no_where_a_layer_is_not_plain():
    x, linear = torch.randn(2, 4), nn.Linear(4, 4)
    assert usable(x, linear)
    assert not usable(x.double(), linear)
    assert not usable(x, nn.Linear(4, 4, bias=False))
    assert not usable(x, nn.Dropout(0.1))
    assert usable(x, nn.Dropout(0.1).eval())
    assert not usable(x, nn.ReLU())
    assert not usable(x, torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert not usable(x, linear)


def test_unknown_attention_is_named():
    with pytest.raises(ValueError, match="one of 'fused', 'stock', but got 'flash'"):
        CondTokSwinTransformer(attn='flash')


@pytest.mark.parametrize('use_abs_pos', [True, False])
def test_vit_adds_up_in_fp32_under_autocast(use_abs_pos):
    kwargs = dict(img_size=64, window_size=3, use_abs_pos=use_abs_pos)
    arch = VIT | dict(feedforward_channels=64, global_attn_indexes=(1, 3))
    stock = ViTSAM(arch, patch_size=16, out_channels=0, **kwargs)
    own = CondTokViT(arch, **kwargs)
    images = torch.randn(1, 3, 64, 64)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert own(images)[0].dtype == stock(images)[0].dtype


@pytest.mark.parametrize('build', [lambda: CondTokViT(VIT), lambda: pair()[1]])
def test_traced_model_can_be_saved(build, tmp_path):
    model = build().eval()
    images = torch.randn(1, 3, 64, 64)
    torch.jit.trace(model, images, strict=False).save(tmp_path / 'model.pt')
    loaded = torch.jit.load(tmp_path / 'model.pt')
    for mine, theirs in zip(loaded(images), model(images), strict=True):
        assert relative_error(mine, theirs.detach()) < 1e-4
