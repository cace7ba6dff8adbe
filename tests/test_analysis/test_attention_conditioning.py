import json

import cv2
import numpy as np
import pytest
import torch
from mmdet.models import SwinTransformer
from mmdet.models.backbones.swin import ShiftWindowMSA

from condtok_mm.analysis.attention_conditioning import (
    SINGULAR,
    UNEXPLAINED,
    WIDE,
    ensure_conditioner,
    measure_layer,
    summarise_layer,
)
from condtok_mm.analysis.attention_reading import AttentionLayer, read_attention
from condtok_mm.models import CondTok, CondTokSwinTransformer, CondTokViT, CondTokXCiT
from condtok_mm.models.backbones.vit import Attention

from ..conftest import photograph, randomise, reference
from ..test_tools import ROOT, run

ARCH = dict(embed_dims=16, num_layers=3, num_heads=2, global_attn_indexes=(2,))
SWIN = dict(
    embed_dims=16,
    depths=(2, 1, 1, 1),
    num_heads=(2, 2, 4, 4),
    window_size=3,
    drop_path_rate=0.0,
)
CONDITIONER = dict(kappa=2.0, floor=0.1)
CONFIG = ROOT / 'configs/demo/mask-rcnn_vit-demo-condtok_simple-fpn_shapes.py'
TWIN = CONFIG.with_name(CONFIG.name.replace('-condtok', ''))
TOOL = 'analysis_tools/attention_conditioning.py'


def ready(model):
    """With random weights, in evaluation mode; mmdet's Swin returns None from it."""
    model.eval()
    return randomise(model, 0.2)


def vit(**kwargs):
    """Windows of 3 x 3 on a map of 8 x 7 tokens: the last ones are padded."""
    sizes = dict(img_size=(64, 56), patch_size=8, window_size=3)
    return ready(CondTokViT(ARCH, conditioner=CONDITIONER, **sizes, **kwargs))


def swin(cls=CondTokSwinTransformer, **kwargs):
    return ready(cls(**SWIN, **kwargs))


def wrapped(kind, **kwargs):
    backbone = dict(type=f'mmpretrain.{kind}', **kwargs)
    return ready(CondTok(backbone, conditioner=CONDITIONER))


MODELS = {
    'vit': vit,
    'vit with relative positions': lambda: vit(use_rel_pos=True),
    'swin': lambda: swin(conditioner=CONDITIONER),
    'swin, stock attention': lambda: swin(conditioner=CONDITIONER, attn='stock'),
    "mmdet's swin": lambda: swin(SwinTransformer),
    "mmpretrain's vit": lambda: wrapped(
        'VisionTransformer',
        arch=dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32),
        img_size=(64, 56),
        patch_size=8,
        out_type='featmap',
    ),
    "mmpretrain's swin": lambda: wrapped(
        'SwinTransformer',
        arch=dict(embed_dims=16, depths=[2, 1, 1, 1], num_heads=[2, 2, 4, 4]),
        img_size=64,
        window_size=3,
        pad_small_map=True,
    ),
}


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kappa(matrix):
    """s_1 / s_r, the rank r, and whether it is clear: empty places are equal rows."""
    values = np.linalg.svd(matrix, compute_uv=False)
    ratios = values / values[..., :1]
    rank = (ratios > 1e-10).sum(-1)
    smallest = np.take_along_axis(values, rank[..., None] - 1, -1)[..., 0]
    return (
        values[..., 0] / smallest,
        rank,
        ((ratios > 1e-10) | (ratios < 8e-16)).all(-1),
    )


def cut(grid, side, shift=0):
    """Windows (n, side * side, D) of a map (H, W, D), padded with zeros and rolled."""
    height, width, channels = grid.shape
    grid = np.pad(grid, ((0, -height % side), (0, -width % side), (0, 0)))
    grid = np.roll(grid, (-shift, -shift), (0, 1))
    down, across = grid.shape[0] // side, grid.shape[1] // side
    grid = grid.reshape(down, side, across, side, channels).swapaxes(1, 2)
    return grid.reshape(-1, side * side, channels)


def heads_of(windows, linear, count):
    """Q, K, V, each (n, heads, N, d), and Wv (heads, D, d)."""
    weight, bias = (p.detach().numpy() for p in (linear.weight, linear.bias))
    parts = (windows @ weight.T + bias).reshape(*windows.shape[:2], 3, count, -1)
    Wv = weight[2 * len(weight) // 3 :].reshape(count, -1, weight.shape[1])
    return parts.transpose(2, 0, 3, 1, 4), Wv.swapaxes(1, 2)


def swin_bias(layer, hw):
    """Relative positions and shift mask (n, heads, N, N), place by place."""
    side, shift = layer.window_size, layer.shift_size
    table = layer.w_msa.relative_position_bias_table.detach().numpy()
    y, x = np.divmod(np.arange(side * side), side)
    rows, columns = (axis[:, None] - axis + side - 1 for axis in (y, x))
    bias = table[rows * (2 * side - 1) + columns].transpose(2, 0, 1)[None]
    if not shift:
        return bias
    # Two places are apart if the roll brought one of them round and not the other.
    height, width = (size + -size % side for size in hw)
    round_y = (np.arange(height) < shift)[:, None].repeat(width, 1)
    round_x = (np.arange(width) < shift)[None].repeat(height, 0)
    regions = cut((2 * round_y + round_x)[..., None], side, shift)[..., 0]
    return bias - 100.0 * (regions[:, None, :, None] != regions[:, None, None, :])


def vit_bias(layer, query, hw):
    """Decomposed relative positions (n, heads, N, N) from unscaled queries."""
    tables = [t.detach().numpy() for t in (layer.rel_pos_h, layer.rel_pos_w)]
    places = np.divmod(np.arange(hw[0] * hw[1]), hw[1])
    vectors = (
        table[axis[:, None] - axis + size - 1]
        for table, axis, size in zip(tables, places, hw, strict=True)
    )
    return np.einsum('nhqc,qkc->nhqk', query, sum(vectors))


def calls(model, image):
    """What each attention layer is called with."""
    seen, handles = [], []
    for layer in model.modules():
        if isinstance(layer, ShiftWindowMSA | Attention):
            hook = lambda layer, args: seen.append((layer, *args))  # noqa: E731
            handles.append(layer.register_forward_pre_hook(hook))
    with torch.no_grad():
        model(image)
    for handle in handles:
        handle.remove()
    return seen


def expected(layer, x, hw, window=None):
    """X, S, S V and S X Wv of a layer by NumPy, from its weights."""
    grid = x[0].numpy().reshape(*hw, -1)
    if window is None:
        windows = cut(grid, layer.window_size, layer.shift_size)
        (Q, K, V), Wv = heads_of(windows, layer.w_msa.qkv, layer.w_msa.num_heads)
        bias = swin_bias(layer, hw)
    else:
        hw = (window, window) if window else hw
        windows = cut(grid, window) if window else x.numpy()
        (Q, K, V), Wv = heads_of(windows, layer.qkv, layer.num_heads)
        bias = vit_bias(layer, Q, hw) if layer.use_rel_pos else 0
    S = softmax(Q @ K.swapaxes(-1, -2) / np.sqrt(Q.shape[-1]) + bias)
    return windows, S, S @ V, S @ (windows[:, None] @ Wv), Wv


@pytest.mark.parametrize(
    'name', ['vit', 'vit with relative positions', 'swin', 'swin, stock attention']
)
def test_kappas_are_those_of_numpy_in_float64(name):
    """The model runs in float64 too, so that all digits of its tokens are the same."""
    model, image = MODELS[name]().double(), photograph(64, 56)[None].double()
    reports = [measure_layer(layer) for layer in read_attention(model, image, 99)]
    layers = calls(model, image)
    assert len(reports) == len(layers) > 2
    clear_cases, cases = 0, 0
    for report, call in zip(reports, layers, strict=True):
        X, S, SV, SXW, Wv = expected(*call)
        of_heads = S.shape[:2]
        tokens = np.broadcast_to(X[:, None], (*of_heads, *X.shape[1:]))
        weights = np.broadcast_to(Wv, (len(X), *Wv.shape))
        terms = report.softmax.terms
        for measured, ranks, matrix in (
            (*report.attention, S),
            (*report.output, SV),
            (report.softmax.kappa, report.softmax.rank, SXW),
            (terms['X'], None, tokens),
            (terms['Wv'], None, weights),
        ):
            value, rank, clear = kappa(matrix)
            clear_cases, cases = clear_cases + clear.sum(), cases + clear.size
            np.testing.assert_allclose(
                measured.view(of_heads)[clear], value[clear], rtol=1e-4
            )
            if ranks is not None:
                np.testing.assert_array_equal(ranks.view(of_heads)[clear], rank[clear])
    assert clear_cases > 0.8 * cases


def test_first_layer_of_a_vit_follows_from_the_image():
    """Embedding, correction, positions, norm and attention, all by NumPy."""
    model, image = vit().double(), photograph(64, 56).double()
    layer = next(read_attention(model, image[None], 99))
    weights = {k: v.detach().numpy() for k, v in model.named_parameters()}
    patches = image.numpy().reshape(3, 8, 8, 7, 8).transpose(1, 3, 0, 2, 4)
    kernel = weights['patch_embed.projection.weight'].reshape(16, -1)
    X = patches.reshape(56, -1) @ kernel.T + weights['patch_embed.projection.bias']
    X = reference(X, floor=0.1) + weights['pos_embed'].reshape(56, 16)
    X = (X - X.mean(1, keepdims=True)) / np.sqrt(X.var(1, keepdims=True) + 1e-6)
    X = X * weights['layers.0.ln1.weight'] + weights['layers.0.ln1.bias']
    windows = cut(X.reshape(8, 7, 16), 3)
    np.testing.assert_allclose(layer.tokens, windows, rtol=1e-8, atol=1e-8)
    (Q, K, _), _ = heads_of(windows, model.layers[0].attn.qkv, 2)
    S = softmax(Q @ K.swapaxes(-1, -2) / np.sqrt(8))
    for head in range(2):
        np.testing.assert_allclose(layer.matrix(head), S[:, head], rtol=1e-7)


@pytest.mark.parametrize('name', MODELS)
def test_measured_output_is_that_of_the_layer(name):
    model, image = MODELS[name](), photograph(64, 56)[None]
    with torch.no_grad():
        output = model(image)
    own, handles = [], []
    for module in model.modules():
        if hasattr(module, 'qkv'):
            hook = lambda _, args: own.append(args[0])  # noqa: E731
            handles.append(module.proj.register_forward_pre_hook(hook))
    with torch.no_grad():
        model(image)
    for handle in handles:
        handle.remove()
    layers = list(read_attention(model, image, 99))
    assert len(layers) == len(own) > 1
    for layer, attended in zip(layers, own, strict=True):
        heads = range(layer.value.shape[1])
        SV = torch.cat([layer.matrix(h) @ layer.value[:, h] for h in heads], -1)
        if layer.filled is not None:
            SV = SV[layer.filled.expand_as(SV)]
        # Windows of a map lie in another order than its tokens.
        pair = (part.double().flatten().sort().values for part in (SV, attended))
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for before, after in zip(output, model(image), strict=True):
            assert torch.equal(before, after), 'a hook was left behind'


def test_windows_are_sampled_evenly():
    model, image = swin(conditioner=CONDITIONER), photograph(96, 96)[None]
    every = list(read_attention(model, image, 99))
    some = list(read_attention(model, image, 5))
    # 24 x 24 tokens are 64 windows of 3 x 3.
    chosen = [0, 16, 32, 47, 63]
    for layer, sampled in zip(every[:2], some[:2], strict=True):
        assert len(layer.tokens) == 64
        torch.testing.assert_close(sampled.tokens, layer.tokens[chosen])
        torch.testing.assert_close(sampled.matrix(1), layer.matrix(1)[chosen])


def made_up(tokens, weights, seed=0):
    """A layer of random queries and keys on given tokens (n, N, D)."""
    generator = torch.Generator().manual_seed(seed)
    windows, count, _ = tokens.shape
    _, heads, _, width = weights.shape
    query, key = torch.randn(
        2, windows, heads, count, width, generator=generator, dtype=torch.float64
    )
    value = tokens[:, None] @ weights[2]
    return AttentionLayer(
        'made up', tokens, weights, query, key, value, None, value, None
    )


def test_proposition_holds_on_random_inputs_of_full_rank():
    """Both sides of both bounds by NumPy, and the bounds hold where they are proven."""
    tokens = torch.randn(200, 12, 6, dtype=torch.float64)
    weights = torch.randn(3, 2, 6, 3, dtype=torch.float64)
    layer = made_up(tokens, weights)
    report = measure_layer(layer)
    S = np.stack([layer.matrix(head).numpy() for head in range(2)], 1)
    X, W = tokens.numpy(), weights.numpy()
    left = kappa(S @ X[:, None] @ W[2])[0]
    right = kappa(S)[0] * kappa(X)[0][:, None] * kappa(W[2])[0]
    np.testing.assert_allclose(report.softmax.kappa.view(200, 2), left, rtol=1e-6)
    np.testing.assert_allclose(report.softmax.bound.view(200, 2), right, rtol=1e-6)
    Wq, Wk, Wv = W.swapaxes(1, 2).reshape(3, 6, 6)
    left = kappa(X @ Wq @ Wk.T @ X.swapaxes(1, 2) @ X @ Wv)[0]
    right = kappa(Wq)[0] * kappa(Wk)[0] * kappa(Wv)[0] * kappa(X)[0] ** 3
    np.testing.assert_allclose(report.linear.kappa, left, rtol=1e-6)
    np.testing.assert_allclose(report.linear.bound, right, rtol=1e-6)
    for check in (report.softmax, report.linear):
        assert check.proven.all()
        assert not check.violated.any()
        assert not any(check.explain().values())


def test_wide_tokens_are_proven_with_one_head_only():
    tokens = torch.randn(50, 4, 6, dtype=torch.float64)
    one = made_up(tokens, torch.randn(3, 1, 6, 6, dtype=torch.float64))
    check = measure_layer(one).softmax
    assert check.proven.all()
    assert not check.violated.any()
    two = made_up(tokens, torch.randn(3, 2, 6, 3, dtype=torch.float64))
    assert not measure_layer(two).softmax.proven.any()


def test_violations_are_counted_by_the_condition_that_is_not_met():
    """Wv keeps a direction that these two tokens do not have."""
    tokens = torch.eye(2, 4, dtype=torch.float64)[None]
    weights = torch.zeros(3, 2, 4, 2, dtype=torch.float64)
    weights[:] = torch.tensor([[1.0, 0], [0, 1e-6], [0, 1], [0, 0]])
    report = measure_layer(made_up(tokens, weights))
    assert report.softmax.violated.all()
    counts = report.softmax.explain()
    assert counts.pop(WIDE) == 2
    assert not any(counts.values())
    summary = summarise_layer([report, report])['softmax']
    assert summary['violations'] == summary['cases'] == 4
    assert summary['proven'] == summary['violations_by_unmet'][UNEXPLAINED] == 0


def test_attention_of_two_equal_tokens_is_named_as_singular():
    tokens = torch.randn(1, 6, 3, dtype=torch.float64)
    layer = made_up(tokens, torch.randn(3, 1, 3, 3, dtype=torch.float64))
    layer.query[:, :, 1] = layer.query[:, :, 0]
    report = measure_layer(layer)
    assert report.attention[1].item() == 5
    assert report.softmax.unmet[SINGULAR].all()


def test_other_attention_is_refused():
    arch = dict(embed_dims=16, depth=4, num_heads=2, layer_scale_init_value=1.0)
    model = CondTokXCiT(arch, img_size=64, out_indices=(0, 1, 2, 3)).eval()
    with pytest.raises(ValueError, match=r'xca_layers.0.attn does not .* as in XCiT'):
        list(read_attention(model, photograph(64, 64)[None]))
    model = CondTok(dict(type='mmdet.PyramidVisionTransformer', num_layers=[1] * 4))
    with pytest.raises(ValueError, match='has no attention layer with a projection'):
        list(read_attention(model, photograph(64, 64)[None]))


def test_stock_backbone_is_not_changed_by_an_idle_conditioner():
    model, image = swin(SwinTransformer), photograph(64, 64)[None]
    with torch.no_grad():
        before = model(image)
        ensure_conditioner(model)
        ensure_conditioner(model)
        after = model(image)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A photograph, and a checkpoint with random weights of the baseline."""
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine.config import Config

    folder = tmp_path_factory.mktemp('attention')
    image = 120 + 40 * photograph(48, 64).permute(1, 2, 0).numpy()
    cv2.imwrite(str(folder / 'photograph.png'), image.clip(0, 255).astype(np.uint8))
    (folder / 'broken.png').write_text('no image')
    register_all_modules(init_default_scope=False)
    model = MODELS.build(Config.fromfile(TWIN).model)
    randomise(model)
    torch.save(dict(state_dict=model.state_dict(), meta={}), folder / 'twin.pth')
    return folder


@pytest.fixture(scope='module')
def compared(folder):
    """What the tool prints and writes of one model, off and on."""
    out = run(folder, TOOL, CONFIG, 'twin.pth', '--images', '.', '--max-windows', 2)
    (written,) = folder.glob('work_dirs/attention_conditioning/2*/attention.json')
    return out, written


def test_tool_compares_off_and_on(compared):
    out, written = compared
    assert 'left out: broken.png' in out
    for text in ('attention matrix S', 'attention output S V', 'softmax', 'linear'):
        assert text in out
    assert cv2.imread(str(written.with_name('attention.png'))) is not None
    report = json.loads(written.read_text())
    assert report['images'] == 1
    off, on = report['models']['off'], report['models']['on']
    assert (off['strength'], on['strength']) == (0, 1)
    assert off['embedded_tokens']['mean'] > on['embedded_tokens']['mean'] > 1
    assert len(off['layers']) == len(on['layers']) == 6
    for layers in zip(off['layers'], on['layers'], strict=True):
        for layer in layers:
            count = 4 * (1 if layer['num_tokens'] == [192] else 2)
            assert layer['softmax']['cases'] == count
            assert layer['softmax']['violations_by_unmet'][UNEXPLAINED] == 0
        assert layers[0]['attention']['mean'] != layers[1]['attention']['mean']


def test_tool_compares_two_models(folder, compared):
    """The baseline as a model of its own is the conditioned one with strength 0."""
    images = ('--images', 'photograph.png', '--max-windows', 2, '--out-dir', 'two')
    run(folder, TOOL, CONFIG, 'twin.pth', '--against', TWIN, 'twin.pth', *images)
    (written,) = folder.glob('two/2*/attention.json')
    one, two = (json.loads(p.read_text())['models'] for p in (compared[1], written))
    assert list(two) == ['other', 'this']
    for first, second in (('off', 'other'), ('on', 'this')):
        for key in ('embedded_tokens', 'layers', 'all_layers'):
            assert one[first][key] == two[second][key]


def test_tool_says_what_is_wrong(folder):
    out = run(folder, TOOL, TWIN, 'twin.pth', '--images', '.', expected=1)
    assert 'has no conditioner; use one of the condtok configs' in out
