_base_ = [
    '../_base_/models/mask-rcnn_swin-demo_fpn.py',
    '../_base_/datasets/shapes_instance.py',
    '../_base_/schedules/demo.py',
    '../_base_/demo_runtime.py',
]
