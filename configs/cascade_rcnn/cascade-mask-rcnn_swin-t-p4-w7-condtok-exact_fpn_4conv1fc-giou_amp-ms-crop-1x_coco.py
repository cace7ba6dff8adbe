_base_ = './cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco.py'
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
model = dict(
    backbone=dict(type='CondTokSwinTransformer', conditioner=dict(kappa=2.0, floor=0.0))
)
