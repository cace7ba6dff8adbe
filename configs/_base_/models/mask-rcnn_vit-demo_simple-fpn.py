_base_ = './mask-rcnn_demo.py'
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
featmap_strides = [2, 4, 8, 16]

model = dict(
    backbone=dict(
        _delete_=True,
        type='CondTokViT',
        arch=dict(
            embed_dims=128, num_layers=6, num_heads=4, global_attn_indexes=(2, 5)
        ),
        img_size=128,
        patch_size=8,
        window_size=4,
    ),
    neck=dict(_delete_=True, type='SimpleFPN', in_channels=128, out_channels=64),
    # A patch of 8 pixels gives levels of half the usual strides.
    rpn_head=dict(
        anchor_generator=dict(scales=[8, 10, 12.7], strides=[*featmap_strides, 32])
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(featmap_strides=featmap_strides, finest_scale=14),
        mask_roi_extractor=dict(featmap_strides=featmap_strides, finest_scale=28),
    ),
)
