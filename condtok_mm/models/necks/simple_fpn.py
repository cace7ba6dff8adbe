"""The pyramid of plain vision transformers."""

from collections.abc import Sequence

import torch.nn.functional as F
from mmcv.cnn import ConvModule, build_activation_layer, build_norm_layer
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn

from ...arguments import check_integer
from ...registry import register
from ..arguments import check_arguments, check_init_cfg


@register('MODELS')
class SimpleFPN(BaseModule):
    """Simple feature pyramid of ViTDet (Li et al., arXiv 2203.16527).

    Makes four levels, at 4, 2, 1 and 1/2 times the size of the backbone's last map,
    by deconvolution and pooling, and further ones by subsampling the last.

    Args:
        in_channels (int): Channels of the backbone's map, a multiple of 4.
        out_channels (int): Channels of every level. Defaults to 256.
        num_outs (int): Number of levels, at least 4. Defaults to 5.
        norm_cfg (dict): Norm layer over the channels of a map. Defaults to
            ``dict(type='mmpretrain.LN2d', eps=1e-6)``.
        act_cfg (dict): Activation between the deconvolutions. Defaults to
            ``dict(type='GELU')``.
        init_cfg (dict, optional): Initialisation. Defaults to None.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``num_outs`` is below 4 or ``in_channels`` no multiple of 4,
            or another argument is out of range.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        num_outs: int = 5,
        norm_cfg: dict = dict(type='mmpretrain.LN2d', eps=1e-6),
        act_cfg: dict = dict(type='GELU'),
        init_cfg: dict | None = None,
    ) -> None:
        check_init_cfg('init_cfg', init_cfg)
        super().__init__(init_cfg)
        check_arguments(
            dict(
                in_channels=in_channels,
                out_channels=out_channels,
                norm_cfg=norm_cfg,
                act_cfg=act_cfg,
            )
        )
        check_integer('num_outs', num_outs, 4)
        if in_channels % 4:
            raise ValueError(
                f'in_channels must be a multiple of 4, but got {in_channels}.'
            )
        self.num_outs = num_outs
        half, quarter = in_channels // 2, in_channels // 4
        self.scales = ModuleList(
            [
                nn.Sequential(
                    nn.ConvTranspose2d(in_channels, half, 2, stride=2),
                    build_norm_layer(norm_cfg, half)[1],
                    build_activation_layer(act_cfg),
                    nn.ConvTranspose2d(half, quarter, 2, stride=2),
                ),
                nn.ConvTranspose2d(in_channels, half, 2, stride=2),
                nn.Identity(),
                nn.MaxPool2d(2, ceil_mode=True),
            ]
        )
        self.convs = ModuleList(
            nn.Sequential(
                ConvModule(channels, out_channels, 1, norm_cfg=norm_cfg, act_cfg=None),
                ConvModule(
                    out_channels,
                    out_channels,
                    3,
                    padding=1,
                    norm_cfg=norm_cfg,
                    act_cfg=None,
                ),
            )
            for channels in (quarter, half, in_channels, in_channels)
        )

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Make the pyramid.

        Args:
            inputs (Sequence[Tensor]): Maps of the backbone, of which the last is
                used. Has shape (B, in_channels, H, W).

        Returns:
            tuple[Tensor, ...]: Levels (B, out_channels, h, w), the largest first.
        """
        outs = [
            conv(scale(inputs[-1]))
            for scale, conv in zip(self.scales, self.convs, strict=True)
        ]
        while len(outs) < self.num_outs:
            outs.append(F.max_pool2d(outs[-1], kernel_size=1, stride=2))
        return tuple(outs)
