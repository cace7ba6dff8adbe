import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from condtok_mm.conditioning import TokenConditioner, condition_number

from ..conftest import make_tokens, reference, relative_error

SHAPES = [(4200, 768), (66800, 96), (196, 768), (36, 768), (1, 96)]
KAPPAS = [1e1, 1e2, 1e3, 1e4, 1e5, 1e6]
GRADS = ['detach', 'precondition', 'full']
SOLVERS = ['svd', 'eigh', 'newton_schulz']


def condition_over(tokens, rank):
    """s_1 / s_rank of tokens (N, D) that are well enough conditioned for a Gram."""
    Y = tokens.double().numpy()
    gram = Y.T @ Y if Y.shape[0] >= Y.shape[1] else Y @ Y.T
    eigenvalues = np.linalg.eigvalsh(gram)[::-1]
    return np.sqrt(eigenvalues[0] / eigenvalues[rank - 1])


@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('tokens_kappa', KAPPAS)
def test_bound_and_reference(shape, tokens_kappa):
    """The bound and the float64 reference, for every solver and both knobs."""
    X = make_tokens(*shape, tokens_kappa)
    left, values, right = np.linalg.svd(X.double().numpy(), full_matrices=False)
    rank = int((values > 4.8e-7 * values[0]).sum())
    assert condition_number(X[None])[1].item() == rank
    for solver in SOLVERS:
        for kappa in (2, 11, 101):
            Y = TokenConditioner(kappa=kappa, solver=solver)(X[None])[0]
            assert condition_over(Y, rank) <= 1.01 * kappa
            if tokens_kappa <= 1e4:
                expected = (left * (values + values[0] / (kappa - 1))) @ right
                assert relative_error(Y, expected) < 1e-3
        for floor, tolerance in ((0.03, 5e-5), (0.1, 1e-5), (0.3, 1e-5)):
            Y = TokenConditioner(floor=floor, solver=solver)(X[None])[0]
            fade = values / np.sqrt(values**2 + (floor * values[0]) ** 2)
            expected = (left * (values + values[0] * fade)) @ right
            assert relative_error(Y, expected) < tolerance


@pytest.mark.parametrize('kappa', [1.5, 2.0, 11.0])
@pytest.mark.parametrize('floor', [0.03, 0.1, 0.3])
def test_directions_above_the_floor_obey_their_bound(kappa, floor):
    X = make_tokens(500, 64, 1e4)
    above = torch.linalg.svdvals(X.double())
    above = int((above >= floor * above[0]).sum())
    Y = TokenConditioner(kappa=kappa, floor=floor)(X[None])[0]
    values = torch.linalg.svdvals(Y.double())
    alpha = 1 / (kappa - 1)
    assert values[0] / values[above - 1] <= (1 + alpha) / (floor + alpha / 2**0.5)


@pytest.mark.parametrize('solver', SOLVERS)
@pytest.mark.parametrize('grad', GRADS)
@pytest.mark.parametrize('floor', [0.0, 0.1])
@pytest.mark.parametrize(
    'tokens',
    [
        torch.ones(2, 40, 16),
        torch.zeros(2, 40, 16),
        torch.randn(2, 1, 16),
        torch.randn(2, 7, 16),
        torch.randn(2, 40, 4) @ torch.randn(4, 16),
        torch.eye(16).repeat(2, 3, 1),
    ],
    ids=['constant', 'zero', 'one token', 'wide', 'low rank', 'equal values'],
)
def test_degenerate_tokens_are_finite(tokens, floor, grad, solver):
    X = tokens.clone().requires_grad_()
    Y = TokenConditioner(solver=solver, grad=grad, floor=floor)(X)
    Y.square().sum().backward()
    assert Y.isfinite().all()
    assert X.grad.isfinite().all()
    expected = np.stack([reference(x, floor=floor) for x in tokens])
    tolerance = 1e-3 if solver == 'newton_schulz' and floor == 0 else 1e-5
    error = np.linalg.norm(Y.detach().numpy() - expected)
    assert error <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize('solver', SOLVERS)
@pytest.mark.parametrize('floor', [0.0, 0.1])
def test_noise_outside_the_range_is_not_amplified(floor, solver):
    """Rank 20 of 48 with rounding noise at 1e-8 in the rest, as Swin's tokens have."""
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(48, 48)))[0]
    X = rng.normal(size=(900, 20)) @ basis[:, :20].T
    X += 1e-8 * np.linalg.norm(X, 2) * rng.normal(size=(900, 48)) / 30
    X = torch.from_numpy(X).float()
    assert condition_number(X[None])[1].item() == 20
    C = TokenConditioner(solver=solver, floor=floor)(X[None])[0].double() - X.double()
    outside = np.linalg.norm(C.numpy() @ basis[:, 20:], 2)
    assert outside < 1e-4 * np.linalg.norm(X.numpy(), 2)


@pytest.mark.parametrize('floor', [0.0, 0.1])
def test_solvers_and_thread_counts_agree(floor):
    X = make_tokens(3000, 96, 1e4)[None]
    eigh = TokenConditioner(solver='eigh', floor=floor)
    threads = torch.get_num_threads()
    results = [TokenConditioner(solver='svd', floor=floor)(X)]
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(eigh(X))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert relative_error(other, results[0]) < 1e-4


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), -float('inf')])
def test_non_finite_image_passes_through_and_leaves_the_others(bad):
    X = torch.randn(3, 50, 16)
    conditioner = TokenConditioner()
    clean = conditioner(X)
    X[1, 7, 3] = bad
    X.requires_grad_()
    Y = conditioner(X)
    assert torch.equal(Y[1].nan_to_num(), X[1].nan_to_num())
    assert torch.equal(Y[[0, 2]], clean[[0, 2]])
    Y.nan_to_num().sum().backward()
    assert X.grad[[0, 2]].isfinite().all()


@pytest.mark.parametrize('scale', [1e-38, 1e-30, 1e30, 1e37])
def test_scale_of_the_tokens_does_not_matter(scale):
    X = torch.randn(1, 200, 32)
    Y = TokenConditioner(floor=0.1)(X * scale)
    assert relative_error(Y.double() / scale, reference(X[0], floor=0.1)) < 1e-5


def test_correction_that_does_not_fit_the_dtype_passes_through():
    X = torch.full((1, 4000, 2), 6e4, dtype=torch.float16)
    X[0, ::2, 1] = -6e4
    assert torch.equal(TokenConditioner(kappa=1.01)(X), X)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_is_kept(dtype):
    X = torch.randn(2, 60, 16).to(dtype)
    Y = TokenConditioner(floor=0.1)(X)
    assert Y.dtype == dtype
    expected = np.stack([reference(x.double(), floor=0.1) for x in X])
    assert relative_error(Y.double(), expected) < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize('grad', GRADS)
def test_rescale_keeps_the_norm_and_kappa(grad):
    X = make_tokens(300, 32, 1e3)[None]
    plain = TokenConditioner(grad=grad)(X)
    Y = TokenConditioner(rescale=True, grad=grad)(X)
    torch.testing.assert_close(Y.norm(), X.norm())
    torch.testing.assert_close(condition_number(Y)[0], condition_number(plain)[0])


def test_invalid_tokens_neither_change_nor_count():
    X = torch.randn(2, 80, 16)
    valid = torch.rand(2, 80) < 0.6
    for rescale in (False, True):
        conditioner = TokenConditioner(rescale=rescale)
        Y = conditioner(X, valid)
        assert torch.equal(Y[~valid], X[~valid])
        for x, y, mask in zip(X, Y, valid, strict=True):
            torch.testing.assert_close(y[mask], conditioner(x[mask][None])[0])
    no_token = torch.zeros(2, 80, dtype=torch.bool)
    assert torch.equal(conditioner(X, no_token), X)


def test_strength_interpolates_from_the_identity():
    X = torch.randn(2, 80, 16)
    conditioner = TokenConditioner()
    C = conditioner(X) - X
    conditioner.strength = 0.25
    torch.testing.assert_close(conditioner(X), X + 0.25 * C)
    conditioner.strength = 0
    assert conditioner(X) is X


def test_grad_detach_passes_the_gradient_as_it_is():
    X = torch.randn(2, 80, 16, requires_grad=True)
    weight = torch.randn(2, 80, 16)
    (TokenConditioner(grad='detach')(X) * weight).sum().backward()
    assert torch.equal(X.grad, weight)


@pytest.mark.parametrize('solver', SOLVERS)
@pytest.mark.parametrize('shape', [(80, 16), (9, 16)], ids=str)
def test_grad_precondition_multiplies_by_P(shape, solver):
    """P = I + alpha s_1 (X^T X + (floor s_1)^2 I)^(-1/2), from NumPy."""
    X = torch.randn(1, *shape, requires_grad=True)
    weight = torch.randn(1, *shape)
    conditioner = TokenConditioner(3.0, solver, floor=0.2, grad='precondition')
    (conditioner(X) * weight).sum().backward()
    matrix = X[0].detach().double().numpy()
    top = np.linalg.norm(matrix, 2)
    values, basis = np.linalg.eigh(matrix.T @ matrix + (0.2 * top) ** 2 * np.eye(16))
    P = np.eye(16) + 0.5 * top * (basis / np.sqrt(values)) @ basis.T
    assert relative_error(X.grad[0], weight[0].double().numpy() @ P) < 1e-5


@pytest.mark.parametrize('rescale', [False, True])
@pytest.mark.parametrize('floor', [0.0, 0.1, 1.0])
@pytest.mark.parametrize('shape', [(12, 5), (4, 7)], ids=str)
def test_grad_full_is_the_derivative(shape, floor, rescale):
    X = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True)
    for solver in SOLVERS:
        conditioner = TokenConditioner(
            solver=solver, floor=floor, grad='full', rescale=rescale
        )
        assert gradcheck(conditioner, X, atol=1e-5)


def test_autocast_does_not_reach_the_linear_algebra():
    X = make_tokens(200, 32, 1e3)[None]
    conditioner = TokenConditioner()
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(conditioner(X), conditioner(X))
        inside = conditioner(X)
    assert torch.equal(inside, conditioner(X))


def test_memory_layout_does_not_matter():
    X = torch.randn(2, 16, 80)
    strided = X.transpose(1, 2)
    conditioner = TokenConditioner(floor=0.1)
    torch.testing.assert_close(conditioner(strided), conditioner(strided.contiguous()))


def test_it_holds_no_state_and_can_be_copied():
    conditioner = TokenConditioner(kappa=5.0, floor=0.1, pad_value=[0, 1, 2])
    conditioner.strength = 0.5
    assert not conditioner.state_dict()
    assert not list(conditioner.parameters())
    for twin in (copy.deepcopy(conditioner), pickle.loads(pickle.dumps(conditioner))):
        assert twin.strength == 0.5
        assert repr(twin) == repr(conditioner)


@pytest.mark.parametrize(
    ('kwargs', 'error', 'words'),
    [
        (dict(kappa=1), ValueError, r'kappa must lie in \(1, inf\), but got 1'),
        (dict(kappa=float('nan')), ValueError, 'kappa'),
        (dict(kappa=float('inf')), ValueError, 'kappa'),
        (dict(kappa='2'), TypeError, r"kappa must be a number .*, but got '2'"),
        (dict(kappa=True), TypeError, 'kappa'),
        (dict(floor=-0.1), ValueError, r'floor must lie in \[0, 1\], but got -0.1'),
        (dict(floor=1.1), ValueError, 'floor'),
        (dict(floor=float('nan')), ValueError, 'floor'),
        (dict(solver='qr'), ValueError, "solver must be one of 'auto', 'svd', 'eigh'"),
        (dict(solver=None), ValueError, 'solver'),
        (dict(grad='none'), ValueError, "grad must be one of 'detach'"),
        (dict(rescale=1), TypeError, 'rescale must be True or False, but got 1'),
        (dict(rtol=0), ValueError, r'rtol must lie in \(0, 1\), but got 0'),
        (dict(rtol=1e-9, solver='eigh'), ValueError, "use solver='svd'"),
        (dict(rtol=1e-9, solver='newton_schulz'), ValueError, "use solver='svd'"),
        (dict(pad_value='black'), TypeError, 'pad_value'),
        (dict(pad_value=[0, 'a', 0]), TypeError, 'pad_value'),
        (dict(pad_value=[]), ValueError, 'pad_value must be finite'),
        (dict(pad_value=float('nan')), ValueError, 'pad_value must be finite'),
    ],
    ids=str,
)
def test_bad_arguments_raise_one_sentence(kwargs, error, words):
    with pytest.raises(error, match=words) as caught:
        TokenConditioner(**kwargs)
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('tokens', 'valid', 'error'),
    [
        (torch.randn(4, 5), None, ValueError),
        (torch.ones(1, 4, 5, dtype=torch.int64), None, TypeError),
        (None, None, TypeError),
        (torch.randn(1, 4, 5), torch.ones(1, 4), TypeError),
        (torch.randn(1, 4, 5), torch.ones(1, 3, dtype=torch.bool), ValueError),
    ],
)
def test_bad_inputs_raise(tokens, valid, error):
    for function in (TokenConditioner(), condition_number):
        with pytest.raises(error):
            function(tokens, valid)


@pytest.mark.parametrize('value', [-0.1, 1.1, float('nan')])
def test_strength_out_of_range_raises(value):
    conditioner = TokenConditioner()
    with pytest.raises(ValueError, match=r'strength must lie in \[0, 1\]'):
        conditioner.strength = value


@pytest.mark.parametrize('shape', [(0, 10, 4), (2, 0, 4), (2, 4, 0)], ids=str)
def test_no_token_at_all(shape):
    X = torch.randn(shape)
    assert TokenConditioner()(X).shape == shape
    kappa, rank = condition_number(X)
    assert kappa.tolist() == [1] * shape[0]
    assert rank.tolist() == [0] * shape[0]


def test_auto_takes_the_svd_where_the_range_asks_for_it():
    X = torch.diag(torch.tensor([1.0, 1e-3, 1e-9]))[None]
    for solver in ('svd', 'auto'):
        Y = TokenConditioner(solver=solver, rtol=1e-12)(X)[0].double()
        assert np.linalg.cond(Y.numpy()) < 2.02


def test_full_gradient_has_no_second_derivative():
    X = torch.randn(1, 6, 3, dtype=torch.float64, requires_grad=True)
    Y = TokenConditioner(grad='full')(X)
    (first,) = torch.autograd.grad(Y.square().sum(), X, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        first.sum().backward()


@pytest.mark.parametrize('scale', [1e-320, 1e200, 1e300])
@pytest.mark.parametrize('grad', GRADS)
def test_extreme_float64_scales(scale, grad):
    X = (scale * torch.randn(1, 20, 4, dtype=torch.float64)).requires_grad_()
    conditioner = TokenConditioner(grad=grad, rescale=True, floor=0.1)
    conditioner(X).sum().backward()
    assert X.grad.isfinite().all()


def test_weights_of_a_warm_up_warn_once_where_they_run_at_another_strength():
    tokens = make_tokens(30, 8, 1e2)[None]
    saved, loaded = TokenConditioner(), TokenConditioner()
    saved.strength = 0.25
    state = saved.state_dict()
    assert not state
    loaded.load_state_dict(state)
    with pytest.warns(
        UserWarning, match=r'at conditioner strength 0\.25, but run at 1'
    ):
        loaded(tokens)
    assert loaded.strength == 1
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        loaded(tokens)
        for strength in (0.25, 1.0):
            loaded.load_state_dict(state)
            loaded.strength = strength
            loaded(tokens)
        loaded.strength = 0.25
        loaded.load_state_dict(state)
        loaded(tokens)
        loaded.load_state_dict(TokenConditioner().state_dict())
        loaded(tokens)
