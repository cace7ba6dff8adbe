"""TokenConditioner: X + C with a bounded condition number."""

import warnings

import torch
from torch import Tensor, nn

from ..arguments import check_choice, check_flag, check_number, check_pad_value
from .polar import GRAM_RTOL, SOLVERS, choose_solver, compute_dtype, polar_factor
from .spectrum import check_tokens, default_rtol, entry_scale, largest_entry

GRADS = ('detach', 'precondition', 'full')


class TokenConditioner(nn.Module):
    """Adds to each image's token matrix X the correction C that conditions it.

    With X = U S V^T (N tokens, D channels) and alpha = 1 / (kappa - 1),

        C = alpha * s_1 * U f(S) V^T,    f(s) = s / sqrt(s^2 + (floor * s_1)^2).

    ``kappa=2, floor=0`` is the construction behind Theorem 4.4 of Saratchandran and
    Lucey, arXiv 2505.12789: every singular value of X + C lies in [s_1, 2 s_1]. The
    general ``kappa`` and the noise ``floor`` are this project's additions: without a
    floor the directions that hold only noise are lifted to full strength too.

    There are no parameters, and no state-dict keys unless
    :func:`calibrate_conditioner` has given it a constant P. C is computed per image,
    over valid tokens, and on the numerical range of X only. An image that
    holds inf or nan passes through unchanged, and so does one whose correction does
    not fit the tokens' dtype.

    Args:
        kappa (float): Target condition number (dimensionless), > 1. With ``floor=0``
            an upper bound on kappa(X + C); with a floor, directions of at least
            floor * s_1 obey (1 + alpha) / (floor + alpha / sqrt(2)). Defaults to 2.0.
        solver (str): 'svd' (reference, float64), 'eigh' (eigenvalues of the Gram matrix
            of the shorter side; fp32 from ``floor=0.03`` on, float64 below),
            'newton_schulz' (matrix products in fp32 alone, nothing is read back from
            the device; several passes below ``floor=0.02``, where gradients through P
            are right for tokens of full rank only), or 'auto'. 'auto' is
            'svd' where the numerical range reaches below the 4.8e-7 that a Gram
            matrix resolves, as for fp64 tokens without a floor; otherwise 'eigh' on
            CPU, where it took 0.5 to 1 times as long as 'newton_schulz' with
            ``floor=0.1`` and 0.3 to 1.4 times without, for N x D from 196 x 768 to
            67200 x 96; and 'newton_schulz' on other devices, where eigenvalues need a
            synchronisation and one image after the other, but for a gradient through P
            below ``floor=0.02``. Defaults to 'auto'.
        floor (float): Noise floor in [0, 1], a fraction of s_1 (dimensionless).
            Defaults to 0.0.
        rtol (float, optional): Singular values of at most rtol * s_1 are outside the
            numerical range, and not amplified. Matters where ``floor <= rtol``; a
            larger floor has faded them out. Defaults to None, which is 4 eps of the
            compute dtype: 4.8e-7 up to fp32.
        grad (str): What is constant for the gradient: 'detach' C, 'precondition' the
            D x D matrix P of X + C = X P, 'full' nothing. Defaults to 'detach'.
        rescale (bool): Scale X + C back to the Frobenius norm of X over the valid
            tokens; the factor is a constant for the gradient unless ``grad='full'``.
            Defaults to False.
        pad_value (float | Sequence[float], optional): Pixel value of batch padding
            after normalisation, one for all channels or one per channel. Read by
            :func:`attach_conditioner`. None counts every token. Defaults to 0.0.

    Attributes:
        strength (float): Factor on C in [0, 1]; 0 is the identity. Checkpoints do not
            set it: where weights were saved at less than 1 and run at another one, the
            first forward warns, unless it has been set since they were loaded.
        preconditioner (Tensor | None): The constant P of a calibrated conditioner, for
            all images alike: a buffer (D, D). None computes C for each image.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of its range or an unknown name.
    """

    def __init__(
        self,
        kappa: float = 2.0,
        solver: str = 'auto',
        floor: float = 0.0,
        rtol: float | None = None,
        grad: str = 'detach',
        rescale: bool = False,
        pad_value: float | tuple[float, ...] | None = 0.0,
    ) -> None:
        super().__init__()
        check_number('kappa', kappa, '(1, inf)')
        check_number('floor', floor, '[0, 1]')
        check_choice('solver', solver, ('auto', *SOLVERS))
        check_choice('grad', grad, GRADS)
        check_flag('rescale', rescale)
        if pad_value is not None:
            check_pad_value(pad_value)
        if rtol is not None:
            check_number('rtol', rtol, '(0, 1)')
            if solver in ('eigh', 'newton_schulz') and rtol < GRAM_RTOL:
                raise ValueError(
                    f'rtol={rtol} is below the {GRAM_RTOL:.1e} that solver={solver!r} '
                    "resolves; use solver='svd' or a larger rtol."
                )
        self.kappa = float(kappa)
        self.solver = solver
        self.floor = float(floor)
        self.rtol = rtol
        self.grad = grad
        self.rescale = rescale
        self.pad_value = pad_value
        if isinstance(pad_value, list | tuple):
            self.pad_value = tuple(float(channel) for channel in pad_value)
        elif pad_value is not None:
            self.pad_value = float(pad_value)
        self.strength = 1.0
        self.register_buffer('preconditioner', None)
        self._register_state_dict_hook(_note_strength)

    @property
    def strength(self) -> float:
        """Factor on C in [0, 1]."""
        return self._strength

    @strength.setter
    def strength(self, value: float) -> None:
        check_number('strength', value, '[0, 1]')
        self._strength = float(value)
        self._saved_strength = None

    def extra_repr(self) -> str:
        """Return the arguments, as ``repr`` and the start-up log line show them."""
        return (
            f'kappa={self.kappa:g}, floor={self.floor:g}, solver={self.solver}, '
            f'grad={self.grad}, rescale={self.rescale}, pad_value={self.pad_value}, '
            f'strength={self.strength:g}'
            + (', calibrated' if self.preconditioner is not None else '')
        )

    def forward(self, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return X + C.

        Args:
            tokens (Tensor): Token matrices. Has shape (B, N, D).
            valid (Tensor, optional): Tokens that hold image, boolean. Has shape
                (B, N). Defaults to None, which counts all.

        Returns:
            Tensor: Conditioned tokens (B, N, D) in the dtype of ``tokens``; invalid
            tokens are unchanged.

        Raises:
            TypeError: If tokens are not floating point, or ``valid`` is not boolean.
            ValueError: If a shape is wrong.
        """
        check_tokens(tokens, valid)
        if self._saved_strength is not None and not torch.compiler.is_compiling():
            self._warn_of_strength()
        if self.strength == 0 or tokens.numel() == 0:
            return tokens
        with torch.autocast(tokens.device.type, enabled=False):
            return self._condition(tokens, valid)

    def correction_matrix(self, tokens: Tensor) -> Tensor:
        """P - I of a calibrated conditioner at the present strength.

        Args:
            tokens (Tensor): What it is for; gives the device, dtype and width.

        Returns:
            Tensor: Matrix (D, D); C is X times it.

        Raises:
            ValueError: If the tokens have another width.
        """
        matrix = self.preconditioner.to(tokens)
        if len(matrix) != tokens.shape[-1]:
            raise ValueError(
                f'the conditioner is calibrated for {len(matrix)} channels, but got '
                f'tokens with {tokens.shape[-1]}.'
            )
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return self.strength * (matrix - identity)

    def _warn_of_strength(self) -> None:
        saved, self._saved_strength = self._saved_strength, None
        warnings.warn(
            f'the weights were saved within a warm-up, at conditioner strength '
            f'{saved:g}, but run at {self.strength:g}. A runner with KappaWarmupHook '
            f'sets it; elsewhere say model.backbone.conditioner.strength = {saved:g} '
            f'once they are loaded, or = {self.strength:g} if that is meant.',
            stacklevel=2,
        )

    def _condition(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        rtol = default_rtol(tokens.dtype) if self.rtol is None else self.rtol
        solver = self.solver
        if solver == 'auto':
            solver = choose_solver(tokens, self.floor, rtol, self.grad == 'detach')
        dtype = compute_dtype(solver, tokens.dtype, self.floor)
        if self.preconditioner is not None:
            dtype = torch.promote_types(tokens.dtype, torch.float32)
        embedded = tokens.to(dtype)
        scale, finite = entry_scale(embedded, valid)
        counted = finite if valid is None else finite & valid.unsqueeze(-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.grad != 'detach'):
            rows = (embedded * (counted / scale)).nan_to_num_(0, 0, 0)
            tall, root, reach = self._correction(rows, solver, rtol)
        if valid is not None and tall.shape != rows.shape:
            # On the tokens' side rounding would reach those that do not count.
            root = root * counted.mT
        # Entries of tokens are at most two scales, those of C at most reach scales.
        reach = torch.maximum(2 + reach, largest_entry(root))
        gain = None
        if self.rescale:
            gain = self._rescaling(rows, _product(tall, root, rows))
        root = root * torch.where((reach * scale).isfinite(), scale, 0)
        summed = _product(tall, root, rows, embedded)
        if gain is not None:
            summed = summed * torch.where(counted, gain, 1)
        return cast_if_finite(summed, tokens.dtype, tokens)

    def _correction(
        self, rows: Tensor, solver: str, rtol: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Matrices whose product is C, or C transposed, and a bound of its entries."""
        if self.preconditioner is not None:
            matrix = self.correction_matrix(rows)
            reach = 2 * matrix.abs().sum(0).amax()
            return rows, matrix.expand(rows.shape[0], -1, -1), reach.expand(1, 1, 1)
        if solver != 'svd':
            rtol = max(rtol, GRAM_RTOL)
        # P is D x D; C is the same from either side, and cheaper from the shorter.
        wide = rows.shape[1] < rows.shape[2] and self.grad != 'precondition'
        tall, root, top = polar_factor(
            rows.mT if wide else rows, solver, self.floor, rtol, self.grad != 'full'
        )
        amount = self.strength / (self.kappa - 1) * top
        return tall, amount * root, amount

    def _rescaling(self, rows: Tensor, correction: Tensor) -> Tensor:
        """Ratio (B, 1, 1) of the Frobenius norms before and after."""
        before, after = (
            torch.linalg.vector_norm(matrix, dim=(1, 2), keepdim=True)
            for matrix in (rows, rows + correction)
        )
        ratio = torch.where(after > 0, before / torch.where(after > 0, after, 1), 1)
        return ratio if self.grad == 'full' else ratio.detach()

    def _apply(self, function, *args, **kwargs) -> 'TokenConditioner':
        matrix = self.preconditioner
        super()._apply(function, *args, **kwargs)
        if matrix is not None:
            # A half-precision model keeps an fp32 P: what it lifts would round away.
            self.preconditioner = matrix.to(self.preconditioner.device)
        return self

    def _load_from_state_dict(
        self, state_dict, prefix, metadata, strict, missing, unexpected, errors
    ) -> None:
        saved = metadata.get('strength')
        if saved != self.strength:
            self._saved_strength = saved
        # A calibrated checkpoint calibrates the conditioner that loads it.
        matrix = state_dict.get(f'{prefix}preconditioner')
        if matrix is not None and self.preconditioner is None:
            if matrix.dim() != 2 or len(matrix) != matrix.shape[1]:
                shape = tuple(matrix.shape)
                errors.append(f'{prefix}preconditioner must be square, but is {shape}.')
                return
            self.preconditioner = torch.empty_like(matrix)
        super()._load_from_state_dict(
            state_dict, prefix, metadata, strict, missing, unexpected, errors
        )


def _note_strength(
    module: TokenConditioner, state_dict: dict, prefix: str, metadata: dict
) -> None:
    """Note a strength below 1 in what a state dict tells about its modules."""
    if module.strength < 1:
        metadata['strength'] = module.strength


def _product(
    tall: Tensor, root: Tensor, rows: Tensor, added: Tensor | None = None
) -> Tensor:
    """The product, on the side that the rows (B, N, D) have, plus what is added."""
    if tall.shape != rows.shape:
        tall, root = root.mT, tall.mT
    return tall @ root if added is None else torch.baddbmm(added, tall, root)


def cast_if_finite(conditioned: Tensor, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    """Cast conditioned tokens, or the tokens of an image whose own do not fit.

    Args:
        conditioned (Tensor): Conditioned tokens. Has shape (B, N, D).
        dtype (torch.dtype): What to cast to.
        tokens (Tensor): Tokens before conditioning. Has shape (B, N, D).

    Returns:
        Tensor: Tokens (B, N, D) in ``dtype``.
    """
    if conditioned.dtype == dtype:
        return conditioned
    cast = conditioned.to(dtype)
    fits = largest_entry(cast).isfinite()
    return torch.where(fits, cast, tokens.to(dtype))
