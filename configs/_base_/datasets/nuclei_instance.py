"""Nuclei of the Data Science Bowl 2018 (BBBC038), trained on crops of 128 pixels."""

_base_ = './shapes_instance.py'
data_root = 'data/nuclei/'
metainfo = dict(_delete_=True, classes=('nucleus',), palette=[(230, 25, 75)])
scale = (256, 256)

train_pipeline = [
    dict(type='LoadImageFromFile', backend_args={{_base_.backend_args}}),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='RandomCrop', crop_size=(128, 128), allow_negative_crop=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile', backend_args={{_base_.backend_args}}),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor'),
    ),
]
train_dataloader = dict(
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline)
)
val_dataloader = dict(
    dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline)
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator
