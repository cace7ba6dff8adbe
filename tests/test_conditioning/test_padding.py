import numpy as np
import pytest
import torch

from condtok_mm.conditioning import valid_tokens

from ..conftest import batch_images, photograph


def expected_mask(height, width, stride, grid):
    """A token is padding if its patch starts beyond the image."""
    rows = np.arange(grid[0]) * stride < height
    columns = np.arange(grid[1]) * stride < width
    return (rows[:, None] & columns[None]).ravel()


@pytest.mark.parametrize('stride', [4, 8, 16])
def test_padding_of_a_batch(stride):
    sizes = [(120, 200), (200, 75), (33, 17), (224, 224)]
    images = batch_images([photograph(*size) for size in sizes])
    grid = (images.shape[2] // stride, images.shape[3] // stride)
    valid = valid_tokens(images, grid, 0.0)
    for mask, size in zip(valid, sizes, strict=True):
        np.testing.assert_array_equal(mask.numpy(), expected_mask(*size, stride, grid))


@pytest.mark.parametrize(
    ('size', 'stride', 'rounding'),
    [((1333, 801), 4, np.ceil), ((810, 650), 16, np.floor), ((97, 33), 8, np.ceil)],
)
def test_sizes_that_the_patch_does_not_divide(size, stride, rounding):
    """Embeddings round the grid up or down; both are understood."""
    image = torch.zeros(1, 3, *size)
    used = (size[0] - 3 * stride - 1, size[1] - stride - 1)
    image[:, :, : used[0], : used[1]] = photograph(*used)
    grid = tuple(int(rounding(side / stride)) for side in size)
    mask = valid_tokens(image, grid, 0.0)[0]
    np.testing.assert_array_equal(mask.numpy(), expected_mask(*used, stride, grid))


@pytest.mark.parametrize('stride', [6, 7, 10, 12, 14])
def test_a_given_stride_leaves_nothing_to_guess(stride):
    for height in range(1, 6 * stride, 5):
        for width in (stride, 3 * stride - 1):
            image = torch.zeros(1, 3, height, width)
            used = (max(1, height // 2), max(1, 2 * width // 3))
            image[:, :, : used[0], : used[1]] = 1
            grid = (-(-height // stride), -(-width // stride))
            mask = valid_tokens(image, grid, 0.0, (stride, stride))[0]
            expected = expected_mask(*used, stride, grid)
            np.testing.assert_array_equal(mask.numpy(), expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_images(dtype):
    value = (-2.1179, -2.0357, -1.8044)
    image = photograph(64, 96)[None]
    image[:, :, :, 64:] = torch.tensor(value).view(3, 1, 1)
    assert valid_tokens(image.to(dtype), (8, 12), value).sum() == 64


def test_black_pixels_inside_are_image():
    image = photograph(64, 64)[None]
    image[:, :, :16] = 0
    image[:, :, :, :16] = 0
    image[:, :, 48:, :40] = 0
    assert valid_tokens(image, (8, 8), 0.0).all()


def test_one_channel_of_the_pad_value_is_image():
    image = photograph(64, 64)[None]
    image[:, :2, 32:] = 0
    assert valid_tokens(image, (8, 8), 0.0).all()


def test_value_for_each_channel():
    image = photograph(64, 64)[None]
    value = [(114 - 123.675) / 58.395, (114 - 116.28) / 57.12, (114 - 103.53) / 57.375]
    image[:, :, 40:] = torch.tensor(value).view(3, 1, 1)
    valid = valid_tokens(image, (8, 8), value)[0].view(8, 8)
    assert valid[:5].all()
    assert not valid[5:].any()
    assert valid_tokens(image, (8, 8), 0.0).all()


def test_all_padding_and_non_finite_images():
    images = torch.zeros(2, 3, 32, 32)
    images[1] = float('nan')
    valid = valid_tokens(images, (4, 4), 0.0)
    assert not valid[0].any()
    assert valid[1].all()


@pytest.mark.parametrize(
    ('shape', 'grid', 'value', 'words'),
    [
        ((3, 32, 32), (4, 4), 0.0, r'must have shape \(B, C, H, W\)'),
        ((1, 3, 32, 32), (64, 4), 0.0, 'does not fit'),
        ((1, 3, 32, 32), (0, 4), 0.0, 'does not fit'),
        ((1, 3, 32, 32), (4, 4), [0.0, 1.0], 'each of the 3 channels'),
    ],
)
def test_bad_arguments_raise(shape, grid, value, words):
    with pytest.raises(ValueError, match=words):
        valid_tokens(torch.zeros(shape), grid, value)
