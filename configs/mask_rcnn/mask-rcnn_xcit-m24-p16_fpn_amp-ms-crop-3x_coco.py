_base_ = './mask-rcnn_xcit-s12-p16_fpn_amp-ms-crop-3x_coco.py'

pretrained = 'https://dl.fbaipublicfiles.com/xcit/xcit_medium_24_p16_384_dist.pth'

model = dict(
    backbone=dict(
        arch='medium-24',
        drop_path_rate=0.15,
        init_cfg=dict(checkpoint=pretrained),
    ),
    neck=dict(in_channels=[512, 512, 512, 512]),
)
