"""Inputs that several tests share."""

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import DefaultScope

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _scope():
    """A runner leaves its default scope behind."""
    with DefaultScope.overwrite_default_scope('mmdet'):
        yield


def photograph(height, width, seed=0):
    """A normalised RGB image (3, H, W) with the power spectrum of a photograph.

    Smooth fields over several octaves, edges, sensor noise, 8-bit quantisation and
    JPEG compression.
    """
    rng = np.random.default_rng(seed)
    image = np.zeros((height, width, 3))
    for octave in range(7):
        side = 2**octave + 1
        field = rng.normal(size=(side, side, 3)) * 0.6**octave
        image += cv2.resize(field, (width, height), interpolation=cv2.INTER_CUBIC)
    for _ in range(12):
        center = (int(rng.integers(width)), int(rng.integers(height)))
        color = tuple(float(value) for value in rng.normal(size=3))
        cv2.circle(image, center, int(rng.integers(4, 60)), color, -1)
    image = 127 + 45 * image / image.std() + rng.normal(size=image.shape)
    image = np.clip(image, 0, 255).astype(np.uint8)
    _, buffer = cv2.imencode('.jpg', image)
    image = cv2.imdecode(buffer, cv2.IMREAD_COLOR)[..., ::-1].astype(np.float32)
    return torch.from_numpy((image - MEAN) / STD).permute(2, 0, 1).float()


def batch_images(images, divisor=32, pad_value=0.0):
    """Pad images to the batch's largest size, as mmdet's preprocessor does."""
    sizes = np.array([image.shape[1:] for image in images])
    height, width = (-(-sizes.max(0) // divisor) * divisor).tolist()
    batch = torch.full((len(images), 3, height, width), float(pad_value))
    for slot, image in zip(batch, images, strict=True):
        slot[:, : image.shape[1], : image.shape[2]] = image
    return batch


def randomise(module, std=0.05, seed=0):
    """Make every parameter random: some are zero or one when a model is built."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return module


def make_tokens(count, width, kappa, seed=0):
    """Float32 tokens (N, D) with log-spaced singular values down to 1 / kappa."""
    rng = np.random.default_rng(seed)
    rank = min(count, width)
    left = np.linalg.qr(rng.normal(size=(count, rank)))[0]
    right = np.linalg.qr(rng.normal(size=(width, rank)))[0]
    values = 100 * np.logspace(0, -np.log10(kappa), rank)
    return torch.from_numpy((left * values) @ right.T).float()


def reference(tokens, kappa=2.0, floor=0.0, rtol=4.8e-7):
    """X + C by NumPy's SVD in float64, written from the formula in the paper."""
    X = np.asarray(tokens, dtype=np.float64)
    left, values, right = np.linalg.svd(X, full_matrices=False)
    if values[0] == 0:
        return X
    if floor > rtol:
        fade = values / np.sqrt(values**2 + (floor * values[0]) ** 2)
    else:
        fade = (values > rtol * values[0]).astype(float)
    return X + values[0] / (kappa - 1) * (left * fade) @ right


def relative_error(actual, expected):
    actual = np.asarray(actual.detach() if torch.is_tensor(actual) else actual)
    expected = np.asarray(expected)
    difference = np.linalg.norm(actual.astype(np.float64) - expected)
    return difference / np.linalg.norm(expected)
