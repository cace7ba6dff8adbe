_base_ = './demo.py'
max_epochs = 10
train_cfg = dict(max_epochs=max_epochs, val_interval=5)
param_scheduler = _base_.param_scheduler
param_scheduler[1].update(end=max_epochs, T_max=max_epochs)
