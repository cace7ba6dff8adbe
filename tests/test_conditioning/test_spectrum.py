import numpy as np
import pytest
import torch

from condtok_mm.conditioning import condition_number

from ..conftest import make_tokens


@pytest.mark.parametrize('kappa', [1e1, 1e3, 1e5, 1e6])
@pytest.mark.parametrize('shape', [(2000, 96), (50, 96)], ids=str)
def test_matches_numpy(shape, kappa):
    X = torch.stack([make_tokens(*shape, kappa, seed) for seed in range(2)])
    reported, rank = condition_number(X)
    expected = [np.linalg.cond(x.double().numpy()) for x in X]
    np.testing.assert_allclose(reported.numpy(), expected, rtol=1e-2)
    assert rank.tolist() == [min(shape)] * 2


def test_float64_tokens_reach_below_a_gram_matrix():
    basis = torch.linalg.qr(torch.randn(60, 10, dtype=torch.float64))[0]
    X = basis * torch.logspace(0, -12, 10, dtype=torch.float64)
    kappa, rank = condition_number(X[None])
    torch.testing.assert_close(kappa, torch.tensor([1e12]).double(), rtol=1e-3, atol=0)
    assert rank.item() == 10


def test_only_valid_tokens_count():
    X = torch.randn(1, 100, 8)
    valid = torch.arange(100)[None] < 60
    X[~valid] = 1e6
    inside, _ = condition_number(X, valid)
    torch.testing.assert_close(inside, condition_number(X[:, :60])[0])


def test_rtol_sets_the_range():
    X = torch.diag(torch.tensor([1.0, 0.1, 0.01, 0.001]))[None]
    for rtol, kappa, rank in ((1e-4, 1000, 4), (0.005, 100, 3), (0.5, 1, 1)):
        reported, counted = condition_number(X, rtol=rtol)
        torch.testing.assert_close(reported, torch.tensor([float(kappa)]))
        assert counted.item() == rank


def test_degenerate_tokens():
    X = torch.zeros(3, 20, 8)
    X[1] = torch.randn(20, 8)
    X[2, 0, 0] = float('nan')
    kappa, rank = condition_number(X)
    assert (kappa[0], rank[0]) == (1, 0)
    assert rank[1] == 8
    assert kappa[2].isnan()
    assert rank[2] == 0


def test_half_precision_is_reported_in_float32():
    kappa, _ = condition_number(torch.randn(1, 50, 8).half())
    assert kappa.dtype == torch.float32


@pytest.mark.parametrize('rtol', [-1.0, 0.0, 1.0, float('nan')])
def test_bad_rtol_raises(rtol):
    with pytest.raises(ValueError, match=r'rtol must lie in \(0, 1\)'):
        condition_number(torch.randn(1, 4, 4), rtol=rtol)
