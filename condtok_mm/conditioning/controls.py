"""What a gain must be held against before it is credited to conditioning."""

import torch
from torch import Tensor

from .conditioner import TokenConditioner, cast_if_finite


class ScaleControl(TokenConditioner):
    """Scales tokens by as much as conditioning would have, and conditions nothing.

    Each image's X is multiplied by ||X + C|| / ||X|| (Frobenius norms over the valid
    tokens; C as of :class:`TokenConditioner` with the same arguments), so kappa stays
    what it was. A detector that gains as much with it gains from the scale of its
    tokens. The factor is a constant for the gradient. A control of this project, not of
    arXiv 2505.12789.

    Args:
        **kwargs: Arguments of :class:`TokenConditioner`; with ``rescale=True`` nothing
            would be left to do.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If an argument is out of its range, or ``rescale`` is True.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        if self.rescale:
            raise ValueError(
                'ScaleControl applies the growth that rescale=True takes back; leave '
                'rescale at False.'
            )

    def extra_repr(self) -> str:
        """Return the arguments, and that only their scale is applied."""
        return f'control, scale alone: {super().extra_repr()}'

    def _condition(self, tokens: Tensor, valid: Tensor | None) -> Tensor:
        with torch.no_grad():
            conditioned = super()._condition(tokens, valid)
            before, after = (
                _frobenius(matrix, valid) for matrix in (tokens, conditioned)
            )
            growth = torch.where(before > 0, after / before, 1).nan_to_num(1, 1, 1)
        factor = growth if valid is None else torch.where(valid[..., None], growth, 1)
        return cast_if_finite(tokens * factor, tokens.dtype, tokens)


def _frobenius(matrix: Tensor, valid: Tensor | None) -> Tensor:
    """Norms (B, 1, 1) over the valid rows, in float64."""
    rows = matrix.double()
    if valid is not None:
        rows = torch.where(valid[..., None], rows, 0)
    return torch.linalg.vector_norm(rows, dim=(1, 2), keepdim=True)
