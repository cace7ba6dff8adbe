_base_ = 'mmpretrain::vision_transformer/vit-base-p16_64xb64_in1k.py'

# base_batch_size = (64 GPUs) x (64 samples per GPU)
auto_scale_lr = dict(enable=False, base_batch_size=4096)
