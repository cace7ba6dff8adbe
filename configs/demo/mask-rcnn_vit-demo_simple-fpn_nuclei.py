_base_ = [
    '../_base_/models/mask-rcnn_vit-demo_simple-fpn.py',
    '../_base_/datasets/nuclei_instance.py',
    '../_base_/schedules/demo_6e.py',
    '../_base_/demo_runtime.py',
]
model = dict(
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1))
)
