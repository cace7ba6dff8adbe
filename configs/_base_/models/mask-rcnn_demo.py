"""Mask R-CNN with narrow heads for the five categories of the shapes."""

_base_ = 'mmdet::_base_/models/mask-rcnn_r50_fpn.py'
channels = 64
norm_cfg = dict(type='GN', num_groups=8)
roi_layer = dict(sampling_ratio=1)
num_classes = 5

model = dict(
    neck=dict(out_channels=channels, norm_cfg=norm_cfg),
    rpn_head=dict(
        in_channels=channels,
        feat_channels=channels,
        anchor_generator=dict(scales=[4, 5, 6.35], ratios=[1.0]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(
            out_channels=channels, roi_layer=roi_layer, finest_scale=28
        ),
        bbox_head=dict(
            type='ConvFCBBoxHead',
            num_shared_convs=2,
            num_shared_fcs=1,
            in_channels=channels,
            conv_out_channels=channels,
            fc_out_channels=128,
            num_classes=num_classes,
            reg_class_agnostic=True,
            norm_cfg=norm_cfg,
            loss_bbox=dict(loss_weight=0.25),
        ),
        mask_roi_extractor=dict(out_channels=channels, roi_layer=roi_layer),
        mask_head=dict(
            num_convs=2,
            in_channels=channels,
            conv_out_channels=channels,
            norm_cfg=norm_cfg,
            num_classes=num_classes,
            class_agnostic=True,
        ),
    ),
    train_cfg=dict(
        rpn=dict(sampler=dict(num=64)),
        rpn_proposal=dict(nms_pre=500, max_per_img=250),
        rcnn=dict(
            assigner=dict(pos_iou_thr=0.6, neg_iou_thr=0.5),
            sampler=dict(num=48, pos_fraction=0.5),
        ),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=150)),
)
