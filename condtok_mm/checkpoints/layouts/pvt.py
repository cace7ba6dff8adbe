"""The original PVT and PVTv2, by mmdet's own converter."""

from mmdet.models.backbones.pvt import pvt_convert
from torch import Tensor

from .layout import Layout


def _prepare(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert, without queries whose keys and values are missing."""
    whole = {
        key: value
        for key, value in state_dict.items()
        if '.attn.q.' not in key or key.replace('.q.', '.kv.') in state_dict
    }
    return pvt_convert(whole)


PVT = Layout('original PVT', pattern=r'block1\.\d+\.attn\.(q|kv)\.', prepare=_prepare)
