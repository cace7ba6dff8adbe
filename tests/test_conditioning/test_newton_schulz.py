import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from condtok_mm.conditioning import TokenConditioner
from condtok_mm.conditioning.newton_schulz import (
    inverse_root,
    largest_eigenvalue,
    step_slopes,
)
from condtok_mm.conditioning.polar import choose_solver

from ..conftest import make_tokens, reference, relative_error


class Operators(TorchDispatchMode):
    """Names and dtypes of all that is computed."""

    def __init__(self):
        super().__init__()
        self.names, self.dtypes = set(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        out = function(*args, **(kwargs or {}))
        self.dtypes |= {out.dtype} if torch.is_tensor(out) else set()
        return out


@pytest.mark.parametrize('floor', [0.0, 1e-3, 0.1])
@pytest.mark.parametrize('grad', ['detach', 'precondition', 'full'])
def test_matrix_products_alone_in_fp32(floor, grad):
    X = make_tokens(300, 32, 1e3)[None].requires_grad_()
    with Operators() as seen:
        TokenConditioner(solver='newton_schulz', floor=floor, grad=grad)(
            X
        ).square().sum().backward()
    assert {'mm', 'bmm'} & seen.names
    assert not [n for n in seen.names if 'linalg' in n or 'svd' in n or 'eig' in n]
    assert not {'_local_scalar_dense', 'nonzero', 'is_nonzero'} & seen.names
    assert torch.float64 not in seen.dtypes


@pytest.mark.parametrize('floor', [1e-5, 1e-4, 1e-3, 0.01, 0.02, 0.05, 0.5, 1.0])
@pytest.mark.parametrize('shape', [(500, 96), (40, 96)], ids=str)
def test_any_floor(shape, floor):
    X = make_tokens(*shape, 1e4)
    Y = TokenConditioner(solver='newton_schulz', floor=floor)(X[None])[0]
    assert relative_error(Y, reference(X, floor=floor)) < 2e-4


@pytest.mark.parametrize('rtol', [1e-6, 1e-4, 1e-2, 0.3, 0.9])
def test_any_range_is_cut_sharply(rtol):
    """Directions at three times the range are lifted, at a third of it they are not."""
    values = np.array([1, 0.99, 3 * rtol, rtol / 3])
    values = values[values <= 1]
    left, right = (
        np.linalg.qr(np.random.default_rng(i).normal(size=(n, 8)))[0]
        for i, n in ((0, 200), (1, 8))
    )
    k = len(values)
    X = torch.from_numpy((left[:, :k] * values) @ right[:, :k].T)
    C = TokenConditioner(solver='newton_schulz', rtol=rtol)(X[None])[0] - X
    lifted = np.linalg.norm(C.numpy() @ right[:, :k], axis=0)
    assert lifted == pytest.approx((values > rtol).astype(float), abs=1e-3)


def test_float64_tokens_are_computed_in_float64():
    X = make_tokens(300, 32, 1e4).double()[None]
    Y = TokenConditioner(solver='newton_schulz', floor=0.1)(X)
    assert relative_error(Y[0], reference(X[0], floor=0.1)) < 1e-5


@pytest.mark.parametrize(
    ('floor', 'optimal', 'plain'), [(0.03, 7, 12), (0.1, 5, 9), (0.3, 4, 6)]
)
def test_steps_for_1e_4(floor, optimal, plain):
    """The table of the module: steps until C is right to 1e-4 in all directions."""
    values = torch.logspace(-6, 0, 4001, dtype=torch.float64)
    whole = floor**2 / (1 + floor**2)
    target = (values.square() * (1 - whole) + whole).sqrt()

    def steps(slopes):
        x = target.clone()
        for count, slope in enumerate(slopes, 1):
            x = 0.5 * slope * x * (3 - (slope * x).square())
            if (values * (x - 1) / target).abs().max() < 1e-4:
                return count
        return math.inf

    assert steps(step_slopes(math.sqrt(whole))) == optimal
    assert steps([1.0] * 50) == plain


@pytest.mark.parametrize('smallest', [1e-4, 1e-2, 0.5, 1.0])
def test_inverse_root(smallest):
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(40, 40)))[0]
    values = np.geomspace(smallest, 1, 40)
    A = torch.from_numpy((basis * values) @ basis.T)[None]
    expected = (basis / np.sqrt(values)) @ basis.T
    assert relative_error(inverse_root(A, smallest)[0], expected) < 1e-5


@pytest.mark.parametrize(
    'values',
    [[1.0], [4, 4, 4, 4], [9, 8.9, 1e-6], [1e-3, 0, 0], [0, 0], list(range(1, 769))],
    ids=lambda values: str(len(values)),
)
def test_largest_eigenvalue(values):
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(len(values),) * 2))[0]
    gram = torch.from_numpy((basis * np.array(values, float)) @ basis.T).float()
    largest = largest_eigenvalue(gram[None]).item()
    assert largest == pytest.approx(max(values), rel=1e-3)


def test_images_of_a_batch_do_not_mix():
    X = torch.stack([make_tokens(200, 32, kappa) for kappa in (1e1, 1e3)])
    X[1] *= 1e6
    conditioner = TokenConditioner(solver='newton_schulz')
    both = conditioner(X)
    for x, y in zip(X, both, strict=True):
        assert relative_error(y, conditioner(x[None])[0]) < 1e-4


def test_auto_takes_eigenvalues_for_a_gradient_through_P_without_a_floor():
    """Passes in fp32 do not vanish outside the range, as the gradient must."""
    tokens = torch.empty(1, 10, 4, device='meta')
    assert choose_solver(tokens, 0.0, 4.8e-7, constant=True) == 'newton_schulz'
    assert choose_solver(tokens, 0.1, 4.8e-7, constant=False) == 'newton_schulz'
    assert choose_solver(tokens, 0.0, 4.8e-7, constant=False) == 'eigh'
    assert choose_solver(torch.empty(1, 10, 4), 0.1, 4.8e-7, constant=True) == 'eigh'
