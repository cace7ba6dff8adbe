_base_ = 'mmdet::_base_/default_runtime.py'

default_hooks = dict(
    logger=dict(interval=20),
    checkpoint=dict(interval=1, max_keep_ckpts=2),
    visualization=dict(score_thr=0.6),
)
visualizer = dict(alpha=0.4)
log_processor = dict(window_size=20)
