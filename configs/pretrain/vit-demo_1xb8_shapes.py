_base_ = ['../_base_/schedules/demo.py', 'mmpretrain::_base_/default_runtime.py']
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
classes = ('disc', 'square', 'triangle', 'star', 'cross')

model = dict(
    type='ImageClassifier',
    # The backbone of ../demo/mask-rcnn_vit-demo_simple-fpn_shapes.py.
    backbone=dict(
        type='CondTokViT',
        arch=dict(
            embed_dims=128, num_layers=6, num_heads=4, global_attn_indexes=(2, 5)
        ),
        img_size=128,
        patch_size=8,
        window_size=4,
    ),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=len(classes), in_channels=128),
)
data_preprocessor = dict(
    num_classes=len(classes),
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    to_rgb=True,
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64)),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(64, 64)),
    dict(type='PackInputs'),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='CustomDataset',
        data_root='data/shape_crops',
        data_prefix='train',
        metainfo=dict(classes=classes),
        pipeline=train_pipeline,
    ),
    sampler=dict(type='DefaultSampler', shuffle=True),
)
val_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='CustomDataset',
        data_root='data/shape_crops',
        data_prefix='val',
        metainfo=dict(classes=classes),
        pipeline=test_pipeline,
    ),
    sampler=dict(type='DefaultSampler', shuffle=False),
)
val_evaluator = dict(type='Accuracy', topk=1)
test_dataloader = val_dataloader
test_evaluator = val_evaluator

# base_batch_size = (1 process) x (8 samples per process)
auto_scale_lr = dict(base_batch_size=8)
