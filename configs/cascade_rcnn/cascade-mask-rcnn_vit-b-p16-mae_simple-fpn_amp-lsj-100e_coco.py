_base_ = '../mask_rcnn/mask-rcnn_vit-b-p16-mae_simple-fpn_amp-lsj-100e_coco.py'

norm_cfg = dict(type='mmpretrain.LN2d', eps=1e-6)
bbox_heads = [
    dict(
        type='ConvFCBBoxHead',
        num_shared_convs=4,
        num_shared_fcs=1,
        in_channels=256,
        conv_out_channels=256,
        fc_out_channels=1024,
        roi_feat_size=7,
        num_classes=80,
        norm_cfg=norm_cfg,
        bbox_coder=dict(type='DeltaXYWHBBoxCoder', target_stds=stds),
        reg_class_agnostic=True,
        loss_cls=dict(type='CrossEntropyLoss', use_sigmoid=False, loss_weight=1.0),
        loss_bbox=dict(type='L1Loss', loss_weight=1.0),
    )
    for stds in (
        [0.1, 0.1, 0.2, 0.2],
        [0.05, 0.05, 0.1, 0.1],
        [0.033, 0.033, 0.067, 0.067],
    )
]
rcnn_train_cfg = [
    dict(
        assigner=dict(
            type='MaxIoUAssigner',
            pos_iou_thr=threshold,
            neg_iou_thr=threshold,
            min_pos_iou=threshold,
            match_low_quality=False,
            ignore_iof_thr=-1,
        ),
        sampler=dict(
            type='RandomSampler',
            num=512,
            pos_fraction=0.25,
            neg_pos_ub=-1,
            add_gt_as_proposals=True,
        ),
        mask_size=28,
        pos_weight=-1,
        debug=False,
    )
    for threshold in (0.5, 0.6, 0.7)
]

model = dict(
    type='CascadeRCNN',
    roi_head=dict(
        type='CascadeRoIHead',
        num_stages=3,
        stage_loss_weights=[1, 0.5, 0.25],
        bbox_head=bbox_heads,
    ),
    train_cfg=dict(rcnn=rcnn_train_cfg),
)
