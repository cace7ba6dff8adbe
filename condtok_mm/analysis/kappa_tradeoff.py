"""What each kappa and floor gains, in condition number, and costs, in sensitivity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean

import cv2
import mmcv
import numpy as np
import torch
from mmcv.transforms import Compose
from torch import Tensor, nn

from ..conditioning import TokenConditioner
from ..conditioning.attach import conditioned_layer
from ..conditioning.spectrum import default_rtol, singular_values
from .token_conditioning import compare_spectra

JPEG_QUALITY = 90
RESIZE = 0.95
CANVAS = 1.25
"""Height and width of the batch-mate, as a multiple of the image's."""
MARKED = {(2.0, 0.0): "the paper's", (2.0, 0.1): "this project's"}
"""Settings (kappa, floor) that the plot names."""

Embedded = dict[str, tuple[Tensor, Tensor | None]]
"""Tokens (1, N, D) and which of them count, boolean (1, N), by disturbance."""


@dataclass
class Tradeoff:
    """One setting of the conditioner, on one image or averaged over several.

    Attributes:
        kappa (float | None): Target condition number; None: the tokens as embedded.
        floor (float | None): Noise floor; None as above.
        directions (float): Directions of X of at least floor * s_1, within its rank.
        kappa_above_floor (float): s_1 / s_i of X + C over these (dimensionless).
        kappa_reached (float): The same over the rank of X (dimensionless).
        growth (float): Frobenius norm of X + C over that of X (dimensionless).
        sensitivity (dict[str, float]): Frobenius norm of the change of X + C, over that
            of X + C, by disturbance (dimensionless).
    """

    kappa: float | None
    floor: float | None
    directions: float
    kappa_above_floor: float
    kappa_reached: float
    growth: float
    sensitivity: dict[str, float]


def add_noise(pixels: np.ndarray) -> np.ndarray:
    """Add Gaussian noise of one grey level, the same at each call.

    The sum is rounded to whole grey levels and clipped, as a camera does.

    Args:
        pixels (np.ndarray): 8-bit image. Has shape (H, W, 3).

    Returns:
        np.ndarray: The noisy image.
    """
    noisy = pixels + np.random.default_rng(0).normal(size=pixels.shape)
    return noisy.round().clip(0, 255).astype(np.uint8)


def compress(pixels: np.ndarray) -> np.ndarray:
    """Write and read as JPEG of quality :data:`JPEG_QUALITY`.

    Args:
        pixels (np.ndarray): 8-bit image, BGR. Has shape (H, W, 3).

    Returns:
        np.ndarray: The compressed image.
    """
    _, buffer = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return mmcv.imfrombytes(buffer)


def resize(pixels: np.ndarray) -> np.ndarray:
    """Resize to :data:`RESIZE` of each side and back, so that the grid is the same.

    Args:
        pixels (np.ndarray): 8-bit image. Has shape (H, W, 3).

    Returns:
        np.ndarray: The resampled image.
    """
    smaller = mmcv.imrescale(pixels, RESIZE)
    return mmcv.imresize_like(smaller, pixels)


DISTURBANCES: dict[str, Callable[[np.ndarray], np.ndarray]] = dict(
    noise=add_noise, jpeg=compress, resize=resize
)
"""What is done to the pixels, at the size that the backbone sees."""


@torch.no_grad()
def embed_disturbed(detector: nn.Module, pipeline: Compose, path: Path) -> Embedded:
    """Embed an image, and the image disturbed in several ways.

    Args:
        detector (nn.Module): A detector whose backbone has a conditioner.
        pipeline (Compose): See :func:`condtok_mm.analysis.images.image_pipeline`.
        path (Path): The image.

    Returns:
        Embedded: Tokens as embedded, not conditioned: of the image as 'original', with
        each of :data:`DISTURBANCES`, and as 'padding' in a batch with a larger image.
        Without 'padding' where the conditioner's ``pad_value=None`` counts every token.

    Raises:
        ValueError: If the backbone has no conditioner, or the image in a batch has
            other tokens than alone.
    """
    forward = conditioned_layer(detector.backbone).forward
    data = pipeline(dict(img_path=str(path), img_id=0))
    pixels = data['inputs']

    def embed(*images: Tensor) -> tuple[Tensor, Tensor | None]:
        samples = [data['data_samples']] * len(images)
        batch = dict(inputs=list(images), data_samples=samples)
        image = detector.data_preprocessor(batch, training=False)['inputs'][:1]
        return forward.tokens(image, forward.embed(image))

    tokens, valid = embed(pixels)
    embedded = dict(original=(tokens, valid))
    for name, disturb in DISTURBANCES.items():
        changed = disturb(pixels.permute(1, 2, 0).contiguous().numpy())
        changed = torch.from_numpy(changed).permute(2, 0, 1)
        # The same tokens count, whatever the disturbance makes of a border.
        embedded[name] = embed(changed)[0], valid
    if valid is None:
        return embedded
    height, width = (int(CANVAS * side) for side in pixels.shape[1:])
    embedded['padding'] = embed(pixels, pixels.new_zeros(3, height, width))
    counts = [int(counted.sum()) for counted in (valid, embedded['padding'][1])]
    if counts[0] != counts[1]:
        raise ValueError(
            f'the image has {counts[0]} tokens alone and {counts[1]} in a larger '
            'batch; set pad_value of the conditioner to what data_preprocessor pads '
            'with, and pad_size_divisor of data_preprocessor to a multiple of the '
            "embedding's stride."
        )
    return embedded


@torch.no_grad()
def measure_setting(
    embedded: Embedded, conditioner: TokenConditioner | None
) -> Tradeoff:
    """Condition the tokens of one image and measure what that does.

    Args:
        embedded (Embedded): See :func:`embed_disturbed`.
        conditioner (TokenConditioner | None): The setting; None measures the tokens as
            embedded.

    Returns:
        Tradeoff: The measurement.

    Raises:
        ValueError: If the image has no token.
    """
    before = _counted(*embedded['original'])
    rows = {
        name: _counted(conditioner(tokens, valid) if conditioner else tokens, valid)
        for name, (tokens, valid) in embedded.items()
    }
    after = rows.pop('original')
    rtol = default_rtol(before.dtype)
    if conditioner is not None and conditioner.rtol is not None:
        rtol = conditioner.rtol
    values = (singular_values(matrix[None], rtol=rtol) for matrix in (before, after))
    change = compare_spectra(*values, conditioner.floor if conditioner else 0, rtol)
    return Tradeoff(
        kappa=conditioner.kappa if conditioner else None,
        floor=conditioner.floor if conditioner else None,
        directions=change.directions,
        kappa_above_floor=change.kappa_above_floor,
        kappa_reached=change.kappa_after,
        growth=change.growth,
        sensitivity={
            name: ((disturbed - after).norm() / after.norm()).item()
            for name, disturbed in rows.items()
        },
    )


def _counted(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Rows (n, D) of the tokens that count."""
    return tokens[0] if valid is None else tokens[0, valid[0]]


def average(reports: Sequence[Tradeoff]) -> Tradeoff:
    """Average one setting over images.

    Args:
        reports (Sequence[Tradeoff]): Measurements of one setting, one an image.

    Returns:
        Tradeoff: Arithmetic means, but geometric ones of the condition numbers.
    """
    return Tradeoff(
        kappa=reports[0].kappa,
        floor=reports[0].floor,
        directions=fmean(r.directions for r in reports),
        kappa_above_floor=geometric_mean(r.kappa_above_floor for r in reports),
        kappa_reached=geometric_mean(r.kappa_reached for r in reports),
        growth=fmean(r.growth for r in reports),
        sensitivity={
            name: fmean(r.sensitivity[name] for r in reports)
            for name in reports[0].sensitivity
        },
    )


def plot_tradeoff(points: Sequence[Tradeoff], title: str, path: str | Path) -> None:
    """Plot the condition number reached against the sensitivity to noise.

    Args:
        points (Sequence[Tradeoff]): What to plot; the tokens as embedded, if they are
            among them, become a line.
        title (str): What was measured.
        path (str | Path): Where to write the picture.
    """
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    figure = Figure(figsize=(8, 5.5), layout='constrained')
    axes = figure.subplots()
    axes.set(
        xscale='log',
        yscale='log',
        xlabel='condition number of the tokens, over all directions (left is better)',
        ylabel='change by one grey level of noise (low is better)',
        title=title,
    )
    floors = sorted({point.floor for point in points if point.floor is not None})
    for index, point in enumerate(sorted(points, key=lambda p: p.kappa_reached)):
        place = (point.kappa_reached, point.sensitivity['noise'])
        if point.kappa is None:
            color, label = 'black', 'no correction'
            axes.axhline(place[1], color=color, linestyle=':', linewidth=1)
        else:
            color = colormaps['viridis'](0.9 * floors.index(point.floor) / len(floors))
            label = f'kappa {point.kappa:g}, floor {point.floor:g}'
        if name := MARKED.get((point.kappa, point.floor)):
            label = f'{label}: {name}'
            axes.plot(*place, '*', color='tab:red', markersize=20)
        axes.plot(*place, 'o', color=color)
        # Alternating sides: the points lie close to a falling line.
        side = 1 if index % 2 == 0 else -1
        axes.annotate(
            label,
            place,
            xytext=(7 * side, 4 * side),
            textcoords='offset points',
            color=color,
            fontsize='small',
            ha='left' if side > 0 else 'right',
            va='bottom' if side > 0 else 'top',
        )
    axes.margins(x=0.3, y=0.1)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f'{100 * value:g} %')
    figure.savefig(path, dpi=120)
