_base_ = [
    '../_base_/models/mask-rcnn_swin-demo_fpn.py',
    '../_base_/datasets/nuclei_instance.py',
    '../_base_/schedules/demo_10e.py',
    '../_base_/demo_runtime.py',
]
# Nuclei are 11 pixels wide, by the median.
model = dict(
    rpn_head=dict(anchor_generator=dict(scales=[2, 3, 4])),
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1)),
)
