_base_ = [
    'mmdet::_base_/models/mask-rcnn_r50_fpn.py',
    'mmdet::common/lsj-100e_coco-instance.py',
]
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)

image_size = (1024, 1024)
pretrained = 'https://download.openmmlab.com/mmselfsup/1.x/mae/mae_vit-base-p16_8xb512-fp16-coslr-1600e_in1k/mae_vit-base-p16_8xb512-fp16-coslr-1600e_in1k_20220825-f7569ca2.pth'
norm_cfg = dict(type='mmpretrain.LN2d', eps=1e-6)

model = dict(
    # Training and test images are padded to the square that the windows divide.
    data_preprocessor=dict(pad_size_divisor=1024),
    backbone=dict(
        _delete_=True,
        type='CondTokViT',
        arch='base',
        img_size=1024,
        patch_size=16,
        window_size=14,
        drop_path_rate=0.1,
        use_rel_pos=True,
        init_cfg=dict(type='Pretrained', checkpoint=pretrained),
    ),
    neck=dict(
        _delete_=True,
        type='SimpleFPN',
        in_channels=768,
        out_channels=256,
        num_outs=5,
        norm_cfg=norm_cfg,
    ),
    rpn_head=dict(num_convs=2),
    roi_head=dict(
        bbox_head=dict(type='Shared4Conv1FCBBoxHead', norm_cfg=norm_cfg),
        mask_head=dict(norm_cfg=norm_cfg),
    ),
)

test_pipeline = [
    dict(type='LoadImageFromFile', backend_args={{_base_.backend_args}}),
    dict(type='Resize', scale=image_size, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    _delete_=True,
    type='AmpOptimWrapper',
    constructor='LayerDecayOptimWrapperConstructor',
    paramwise_cfg=dict(
        decay_rate=0.7,
        norm_decay_mult=0.0,
        custom_keys={'pos_embed': dict(decay_mult=0.0)},
    ),
    optimizer=dict(type='AdamW', lr=0.0001, betas=(0.9, 0.999), weight_decay=0.1),
)

# 25 epochs over the data set repeated 4 times are 100 epochs.
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=250),
    dict(
        type='MultiStepLR',
        begin=0,
        end=25,
        by_epoch=True,
        milestones=[22, 24],
        gamma=0.1,
    ),
]

# base_batch_size = (64 GPUs) x (1 sample per GPU)
auto_scale_lr = dict(enable=False, base_batch_size=64)
