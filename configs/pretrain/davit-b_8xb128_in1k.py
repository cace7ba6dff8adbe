_base_ = 'mmpretrain::davit/davit-base_4xb256_in1k.py'

model = dict(
    init_cfg=[
        dict(type='TruncNormal', layer='Linear', std=0.02),
        dict(type='Constant', layer='LayerNorm', val=1.0, bias=0.0),
    ],
    head=dict(init_cfg=None),
)

train_dataloader = dict(batch_size=128)

optim_wrapper = dict(clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(_base_.param_scheduler[0], end=5),
    dict(_base_.param_scheduler[1], begin=5),
]

# base_batch_size = (8 GPUs) x (128 samples per GPU)
auto_scale_lr = dict(enable=False, base_batch_size=1024)
