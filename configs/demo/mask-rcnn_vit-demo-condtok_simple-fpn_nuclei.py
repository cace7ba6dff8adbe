_base_ = './mask-rcnn_vit-demo_simple-fpn_nuclei.py'
model = dict(backbone=dict(conditioner=dict(kappa=2.0, floor=0.1)))
