_base_ = './mask-rcnn_swin-demo_fpn_nuclei.py'
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
model = dict(
    backbone=dict(type='CondTokSwinTransformer', conditioner=dict(kappa=2.0, floor=0.1))
)
