_base_ = 'mmpretrain::deit/deit-base_16xb64_in1k.py'

train_dataloader = dict(sampler=dict(type='RepeatAugSampler'))

optim_wrapper = dict(clip_grad=None)
param_scheduler = [
    dict(_base_.param_scheduler[0], end=5),
    dict(_base_.param_scheduler[1], begin=5),
]

# base_batch_size = (16 GPUs) x (64 samples per GPU)
auto_scale_lr = dict(enable=False, base_batch_size=1024)
