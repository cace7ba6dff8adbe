_base_ = './cascade-mask-rcnn_vit-b-p16-mae_simple-fpn_amp-lsj-100e_coco.py'
model = dict(backbone=dict(conditioner=dict(kappa=2.0, floor=0.0)))
