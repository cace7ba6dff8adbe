_base_ = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco.py'
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)

pretrained = 'https://dl.fbaipublicfiles.com/xcit/xcit_small_12_p16_384_dist.pth'

model = dict(
    backbone=dict(
        _delete_=True,
        type='CondTokXCiT',
        arch='small-12',
        patch_size=16,
        drop_path_rate=0.05,
        init_cfg=dict(type='Pretrained', checkpoint=pretrained),
    ),
    neck=dict(in_channels=[384, 384, 384, 384]),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(
        type='MultiStepLR',
        begin=0,
        end=36,
        by_epoch=True,
        milestones=[27, 33],
        gamma=0.1,
    ),
]

# The batch norms count the images of all GPUs, where there are several.
sync_bn = 'torch'
