"""A constant correction: measured once on images, and folded into the embedding.

X + C = X P with P = I + alpha s_1 (X^T X + (floor s_1)^2 I)^(-1/2), for each image with
its own P. A calibrated conditioner applies one P to all: that of the tokens of many
images as one matrix X. This is this project's addition to arXiv 2505.12789.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..arguments import check_type, shown
from .attach import conditioned_layer, detach_conditioner
from .conditioner import TokenConditioner
from .controls import ScaleControl
from .polar import GRAM_RTOL, gram_spectrum, spectrum_gains
from .spectrum import default_rtol, largest_entry


@torch.no_grad()
def calibrate_conditioner(
    backbone: nn.Module, batches: Iterable[Tensor]
) -> TokenConditioner:
    """Give a backbone's conditioner a constant P, measured on images.

    Args:
        backbone (nn.Module): A backbone with a conditioner. It is changed in place:
            the conditioner gets a buffer ``preconditioner`` (D, D), its only one, in
            checkpoints too.
        batches (Iterable[Tensor]): Normalised images, each (B, C, H, W). Padding is
            left out, and so are images that hold inf or nan.

    Returns:
        TokenConditioner: The conditioner.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If no conditioner is attached, or no image holds a token.
    """
    forward = conditioned_layer(backbone).forward
    gram, dtype = None, torch.float32
    check_type('batches', batches, Iterable, 'an iterable of images')
    for images in batches:
        if not torch.is_tensor(images) or images.dim() != 4:
            raise TypeError(
                f'each of batches must be images (B, C, H, W), but got {shown(images)}.'
            )
        tokens, valid = forward.tokens(images, forward.embed(images))
        dtype = tokens.dtype
        counted = largest_entry(tokens)[..., 0].isfinite()
        counted = counted if valid is None else counted & valid
        rows = torch.where(counted[..., None], tokens.double(), 0)
        total = (rows.mT @ rows).sum(0)
        gram = total if gram is None else gram + total
    if gram is None or not gram.any():
        raise ValueError(
            'batches hold no token to calibrate on: no image, or padding only.'
        )
    conditioner = forward.conditioner
    conditioner.preconditioner = preconditioner(conditioner, gram).to(dtype)
    return conditioner


def preconditioner(conditioner: TokenConditioner, gram: Tensor) -> Tensor:
    """P of X + C = X P, at full strength.

    Args:
        conditioner (TokenConditioner): Gives kappa, the floor and the range.
        gram (Tensor): X^T X in float64. Has shape (D, D).

    Returns:
        Tensor: P (D, D) in float64.
    """
    rtol = conditioner.rtol or default_rtol(torch.float32)
    values, basis = gram_spectrum(gram)
    gains, top = spectrum_gains(values, conditioner.floor, max(rtol, GRAM_RTOL))
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return identity + top * (basis * gains) @ basis.mT / (conditioner.kappa - 1)


@torch.no_grad()
def fold_conditioner(backbone: nn.Module) -> nn.Module:
    """Multiply a calibrated conditioner into the embedding's convolution, and drop it.

    What is left is a stock backbone whose checkpoint stock classes load. Padding of a
    batch, which a conditioner leaves as it is, is conditioned too from then on.

    Args:
        backbone (nn.Module): A backbone with a calibrated conditioner, whose embedding
            is one convolution without a norm. It is changed in place.

    Returns:
        nn.Module: The backbone, without a conditioner.

    Raises:
        TypeError: If ``backbone`` is not a module.
        ValueError: If the conditioner is not calibrated, rescales or is a control, or
            the embedding is more than a convolution. The backbone is then as it was.
    """
    layer = conditioned_layer(backbone)
    conditioner = layer.forward.conditioner
    if conditioner.preconditioner is None:
        raise ValueError(
            'the conditioner is not calibrated; calibrate it before folding.'
        )
    if conditioner.rescale or isinstance(conditioner, ScaleControl):
        kind = 'rescale=True' if conditioner.rescale else 'ScaleControl'
        raise ValueError(f'{kind} depends on each image and cannot be folded.')
    convs = [module for module in layer.modules() if isinstance(module, nn.Conv2d)]
    numbers = sum(parameter.numel() for parameter in layer.parameters())
    if len(convs) != 1 or numbers != sum(p.numel() for p in convs[0].parameters()):
        raise ValueError(
            f'{type(layer).__name__} is more than one convolution (a norm follows it, '
            'say), so P cannot be folded in; keep the calibrated conditioner.'
        )
    conv = convs[0]
    weight = conv.weight.double()
    matrix = conditioner.correction_matrix(weight.flatten(1).T)
    conv.weight.copy_(weight + torch.einsum('dchw,de->echw', weight, matrix))
    if conv.bias is not None:
        bias = conv.bias.double()
        conv.bias.copy_(bias + bias @ matrix)
    return detach_conditioner(backbone)
