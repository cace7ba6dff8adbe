_base_ = [
    '../_base_/models/mask-rcnn_demo.py',
    '../_base_/datasets/shapes_instance.py',
    '../_base_/schedules/demo.py',
    '../_base_/demo_runtime.py',
]
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)

model = dict(
    backbone=dict(
        _delete_=True,
        type='CondTokViT',
        arch=dict(embed_dims=144, num_layers=6, num_heads=4),
        img_size=224,
        patch_size=8,
        window_size=7,
    ),
    neck=dict(_delete_=True, type='SimpleFPN', in_channels=144, out_channels=64),
    # A patch of 8 pixels gives levels of half the usual strides.
    rpn_head=dict(anchor_generator=dict(scales=[8], strides=[2, 4, 8, 16, 32])),
    roi_head=dict(
        bbox_roi_extractor=dict(featmap_strides=[2, 4, 8, 16]),
        mask_roi_extractor=dict(featmap_strides=[2, 4, 8, 16]),
    ),
)
