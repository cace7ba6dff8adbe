_base_ = './vit-demo_1xb8_shapes.py'
model = dict(backbone=dict(conditioner=dict(kappa=2.0, floor=0.1, pad_value=None)))
