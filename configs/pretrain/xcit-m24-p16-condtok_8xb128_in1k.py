_base_ = './xcit-m24-p16_8xb128_in1k.py'
custom_imports = dict(imports=['condtok_mm'], allow_failed_imports=False)
model = dict(
    backbone=dict(
        _delete_=True,
        type='CondTok',
        backbone={{_base_.model.backbone}},
        conditioner=dict(kappa=2.0, floor=0.1, pad_value=None),
    )
)
