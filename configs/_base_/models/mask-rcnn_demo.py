"""Mask R-CNN with narrow heads for the five categories of the shapes."""

_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'
channels = 64
roi_layer = dict(sampling_ratio=1)
num_classes = 5

model = dict(
    neck=dict(out_channels=channels),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(scales=[4]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=channels, roi_layer=roi_layer),
        bbox_head=dict(
            in_channels=channels, fc_out_channels=256, num_classes=num_classes
        ),
        mask_roi_extractor=dict(out_channels=channels, roi_layer=roi_layer),
        mask_head=dict(
            num_convs=2,
            in_channels=channels,
            conv_out_channels=channels,
            num_classes=num_classes,
        ),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=250),
        rcnn=dict(sampler=dict(num=64)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=150)),
)
