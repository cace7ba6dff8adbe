_base_ = './mask-rcnn_demo.py'
model = dict(
    backbone=dict(
        _delete_=True,
        type='SwinTransformer',
        embed_dims=32,
        depths=(1, 1, 2, 1),
        num_heads=(1, 2, 4, 8),
        window_size=4,
        drop_path_rate=0.0,
    ),
    neck=dict(in_channels=[32, 64, 128, 256]),
)
