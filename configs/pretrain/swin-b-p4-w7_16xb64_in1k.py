_base_ = 'mmpretrain::swin_transformer/swin-base_16xb64_in1k.py'

# base_batch_size = (16 GPUs) x (64 samples per GPU)
auto_scale_lr = dict(enable=False, base_batch_size=1024)
