"""What only a GPU can tell; every test here needs one."""

import pytest
import torch

from condtok_mm.conditioning import TokenConditioner, condition_number
from condtok_mm.models import CondTokSwinTransformer

from ..conftest import make_tokens, photograph, randomise, relative_error

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason='torch finds no CUDA GPU'
)


@pytest.mark.parametrize('solver', ['svd', 'eigh', 'newton_schulz'])
@pytest.mark.parametrize('floor', [0.0, 0.1])
def test_same_as_on_the_cpu(solver, floor):
    X = torch.stack([make_tokens(3000, 96, 1e4, seed) for seed in range(2)])
    conditioner = TokenConditioner(solver=solver, floor=floor)
    on_gpu = conditioner(X.cuda())
    assert on_gpu.is_cuda
    assert relative_error(on_gpu.cpu(), conditioner(X)) < 1e-3
    kappa, rank = condition_number(X.cuda())
    torch.testing.assert_close(kappa.cpu(), condition_number(X)[0], rtol=1e-2, atol=0)
    assert rank.tolist() == [96, 96]


def build(**conditioner):
    model = CondTokSwinTransformer(
        embed_dims=24, num_heads=(1, 2, 4, 8), conditioner=conditioner
    )
    return randomise(model).cuda()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('floor', [0.0, 0.1])
def test_autocast_and_tf32_do_not_reach_the_tokens(dtype, floor):
    model = build(floor=floor).eval()
    image = photograph(256, 320)[None].cuda()
    exact = build(floor=floor).cpu().eval().patch_embed(image.cpu())[0]
    with torch.no_grad(), torch.autocast('cuda', dtype=dtype):
        tokens, _ = model.patch_embed(image)
        model.conditioner.strength = 0
        assert tokens.dtype == model.patch_embed(image)[0].dtype
    assert relative_error(tokens.double().cpu(), exact.detach()) < 1e-2


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_amp_training_step(dtype):
    model = build(floor=0.1).train()
    scaler = torch.amp.GradScaler('cuda', enabled=dtype == torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    images = photograph(128, 160)[None].cuda()
    for _ in range(3):
        with torch.autocast('cuda', dtype=dtype):
            loss = sum(out.float().square().mean() for out in model(images))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert loss.isfinite()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize('grad', ['detach', 'precondition', 'full'])
def test_nothing_waits_for_the_gpu(grad):
    model = build(floor=0.1, grad=grad).eval()
    images = photograph(128, 160)[None].cuda()
    sum(out.sum() for out in model(images)).backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        sum(out.sum() for out in model(images)).backward()
    finally:
        torch.cuda.set_sync_debug_mode('default')


def test_fused_attention_is_that_of_the_cpu():
    images = photograph(130, 203)[None]
    model = build(floor=0.1).eval()
    on_gpu = [out.cpu() for out in model(images.cuda())]
    for mine, theirs in zip(on_gpu, model.cpu()(images), strict=True):
        assert relative_error(mine.double(), theirs.detach()) < 1e-2
