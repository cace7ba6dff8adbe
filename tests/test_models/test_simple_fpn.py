import pytest
import torch
from torch.nn import functional as F

from condtok_mm.models import SimpleFPN


@pytest.mark.parametrize('size', [(8, 8), (6, 10), (5, 7), (1, 1)], ids=str)
def test_sizes_and_gradients(size):
    neck = SimpleFPN(in_channels=32, out_channels=16, num_outs=6)
    inputs = torch.randn(2, 32, *size, requires_grad=True)
    outs = neck([inputs])
    height, width = size
    sizes = [(4 * height, 4 * width), (2 * height, 2 * width), size]
    while len(sizes) < 6:
        sizes.append(tuple(-(-side // 2) for side in sizes[-1]))
    assert [tuple(out.shape) for out in outs] == [(2, 16, *size) for size in sizes]
    sum(out.square().sum() for out in outs).backward()
    assert all(p.grad.abs().sum() > 0 for p in neck.parameters() if p.dim() > 1)


def test_level_of_scale_one_is_conv_norm_conv_norm():
    neck = SimpleFPN(in_channels=32, out_channels=16)
    x = torch.randn(1, 32, 6, 6)
    expected = x
    for conv in neck.convs[2]:
        expected = F.conv2d(expected, conv.conv.weight, padding=conv.conv.padding)
        norm = (conv.norm.weight, conv.norm.bias)
        expected = expected.permute(0, 2, 3, 1)
        expected = F.layer_norm(expected, (16,), *norm, 1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(neck([x])[2], expected)


@pytest.mark.parametrize('kwargs', [dict(num_outs=3), dict(in_channels=30)])
def test_bad_arguments_raise(kwargs):
    name, value = next(iter(kwargs.items()))
    with pytest.raises(ValueError, match=f'{name} must be .*{value}'):
        SimpleFPN(**(dict(in_channels=32) | kwargs))
