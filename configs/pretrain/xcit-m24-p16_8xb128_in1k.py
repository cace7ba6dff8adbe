_base_ = 'mmpretrain::xcit/xcit-medium-24-p16_8xb128_in1k.py'
# The batch norms count the images of all GPUs, where there are several.
sync_bn = 'torch'

model = dict(
    backbone=dict(
        drop_path_rate=0.15,
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
    ),
    head=dict(
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02),
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
)

test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='ResizeEdge',
        scale=224,
        edge='short',
        backend='pillow',
        interpolation='bicubic',
    ),
    dict(type='CenterCrop', crop_size=224),
    dict(type='PackInputs'),
]
train_dataloader = dict(sampler=dict(type='RepeatAugSampler'))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'.cls_token': dict(decay_mult=0.0)})
)
param_scheduler = [
    dict(_base_.param_scheduler[0], end=5),
    dict(_base_.param_scheduler[1], begin=5),
]
train_cfg = dict(max_epochs=400)

# base_batch_size = (8 GPUs) x (128 samples per GPU)
auto_scale_lr = dict(enable=False, base_batch_size=1024)
