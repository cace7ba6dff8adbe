"""torch.compile and torch.export of the backbones."""

import pytest
import torch

from condtok_mm._stack import release
from condtok_mm.conditioning import TokenConditioner
from condtok_mm.models import CondTokSwinTransformer, CondTokViT

from ..conftest import photograph, randomise, relative_error

VIT = dict(embed_dims=32, num_layers=2, num_heads=2)
CONDITIONER = dict(floor=0.1)
STOCK_BREAK = 'getfullargspec'
"""What mmengine calls at each forward of an attention."""
WHOLE = release(torch.__version__) >= (2, 5)
"""Whether torch can have that in a graph."""


def swin(**conditioner):
    model = CondTokSwinTransformer(
        embed_dims=32,
        depths=(2, 2),
        num_heads=(1, 2),
        strides=(4, 2),
        out_indices=(0, 1),
        drop_path_rate=0.0,
        conditioner=CONDITIONER | conditioner,
    )
    return randomise(model).eval()


def vit(**conditioner):
    model = CondTokViT(
        VIT,
        img_size=64,
        window_size=3,
        use_rel_pos=True,
        conditioner=CONDITIONER | conditioner,
    )
    return randomise(model).eval()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize('solver', ['auto', 'svd', 'eigh', 'newton_schulz'])
@pytest.mark.parametrize('grad', ['detach', 'full'])
def test_no_graph_break_in_the_conditioner(solver, grad):
    conditioner = TokenConditioner(solver=solver, grad=grad, floor=0.1)
    tokens, valid = torch.randn(2, 60, 16), torch.rand(2, 60) < 0.8
    explained = torch._dynamo.explain(conditioner)(tokens.requires_grad_(), valid)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.parametrize('batch', [1, 2])
@pytest.mark.parametrize('build', [swin, vit])
def test_backbones_compile_whole_and_give_the_same(build, batch):
    model = build()
    images = torch.stack([photograph(64, 96, seed) for seed in range(batch)])
    explained = torch._dynamo.explain(model)(images)
    reasons = [reason.reason for reason in explained.break_reasons]
    assert WHOLE or all(STOCK_BREAK in reason for reason in reasons), reasons
    assert not (WHOLE and reasons), reasons
    torch._dynamo.reset()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=WHOLE)

    def run(function):
        model.zero_grad()
        outs = function(images)
        sum((out * out.detach().roll(1, 1)).sum() for out in outs).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        return [*(out.detach() for out in outs), *grads]

    for mine, theirs in zip(run(compiled), run(model), strict=True):
        assert relative_error(mine, theirs) < 1e-4


@pytest.mark.skipif(not WHOLE, reason=f'torch 2.4 breaks at {STOCK_BREAK}')
@pytest.mark.parametrize('build', [swin, vit])
def test_exported_graph_takes_any_size(build):
    model = build(solver='newton_schulz')
    batch, rows, columns = (torch.export.Dim(n, min=1, max=64) for n in 'brc')
    with torch.no_grad():
        program = torch.export.export(
            model,
            (torch.randn(2, 3, 256, 384),),
            dynamic_shapes=({0: batch, 2: 32 * rows, 3: 32 * columns},),
        ).module()
        for size in ((1, 3, 96, 128), (3, 3, 96, 160), (2, 3, 288, 416)):
            images = torch.randn(size)
            for mine, theirs in zip(program(images), model(images), strict=True):
                assert relative_error(mine, theirs) < 1e-4
