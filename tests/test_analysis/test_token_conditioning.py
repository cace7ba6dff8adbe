import numpy as np
import pytest
import torch

from condtok_mm.analysis import measure_tokens
from condtok_mm.models import CondTokViT

from ..conftest import photograph, reference

ARCH = dict(embed_dims=16, num_layers=1, num_heads=1)


@pytest.mark.parametrize(
    ('patch', 'size', 'side', 'tokens'),
    [(8, (24, 48), 48, 18), (14, (42, 84), 84, 18), (14, (9, 16), 16, 2)],
)
def test_report_of_a_padded_image_is_that_of_the_image_alone(patch, size, side, tokens):
    """Values by NumPy, over the tokens that the conditioner itself counts."""
    model = CondTokViT(
        ARCH, img_size=112, patch_size=patch, conditioner=dict(floor=0.1)
    ).eval()
    image = photograph(*size)
    padded = torch.zeros(1, 3, side, side)
    padded[0, :, : size[0]] = image
    report = measure_tokens(model, padded, 'padded')
    assert (report.num_tokens, report.channels) == (tokens, 16)
    assert report.rank == min(tokens, 16)
    model.conditioner.strength = 0
    with torch.no_grad():
        X = model.patch_embed(image[None])[0][0].double().numpy()
    before = np.linalg.svd(X, compute_uv=False)
    after = np.linalg.svd(reference(X, floor=0.1), compute_uv=False)
    rank = report.rank
    np.testing.assert_allclose(report.values_before[:rank], before, rtol=1e-4)
    np.testing.assert_allclose(report.values_after[:rank], after, rtol=1e-4)
    assert report.kappa_before == pytest.approx(before[0] / before[-1], rel=1e-4)
    assert report.kappa_after == pytest.approx(after[0] / after[-1], rel=1e-4)
    above = (before >= 0.1 * before[0]).sum()
    expected = after[0] / after[above - 1]
    assert report.kappa_above_floor == pytest.approx(expected, rel=1e-4)
    expected = np.linalg.norm(after) / np.linalg.norm(before)
    assert report.growth == pytest.approx(expected, rel=1e-4)


def test_image_without_a_token_is_named():
    model = CondTokViT(ARCH, img_size=64, patch_size=8, conditioner=dict())
    with pytest.raises(ValueError, match=r'black: the image holds nothing but padding'):
        measure_tokens(model, torch.zeros(1, 3, 64, 64), 'black')
