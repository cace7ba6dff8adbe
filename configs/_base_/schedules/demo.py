max_epochs = 5
train_cfg = dict(
    type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=max_epochs
)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')

param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=50),
    dict(
        type='CosineAnnealingLR',
        begin=0,
        end=max_epochs,
        T_max=max_epochs,
        eta_min_ratio=0.01,
        by_epoch=True,
        convert_to_iter_based=True,
    ),
]

optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=0.0005, weight_decay=0.05, fused=True),
    clip_grad=dict(max_norm=1.0),
)

# base_batch_size = (1 process) x (2 samples per process)
auto_scale_lr = dict(enable=False, base_batch_size=2)
