_base_ = './mask-rcnn_xcit-m24-p16_fpn_amp-ms-crop-3x_coco.py'
model = dict(backbone=dict(conditioner=dict(kappa=2.0, floor=0.0)))
