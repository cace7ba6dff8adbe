"""Small conditioned Mask R-CNNs, and images for them."""

from pathlib import Path

import torch
from mmdet.models import BaseDetector
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from torch import Tensor, nn

import condtok_mm

from ..conftest import photograph
from ..test_configs import sample

PIXELS = 64
DEMO = Path(condtok_mm.CONFIGS) / 'demo'
SWIN = DEMO / 'mask-rcnn_swin-demo-condtok_fpn_shapes.py'
VIT = DEMO / 'mask-rcnn_vit-demo-condtok_simple-fpn_shapes.py'
XCIT = dict(
    type='CondTokXCiT',
    arch=dict(embed_dims=48, depth=4, num_heads=4, layer_scale_init_value=1.0),
    out_indices=(0, 1, 2, 3),
    conditioner=dict(kappa=2.0, floor=0.1),
)
NAMES = ('swin', 'vit', 'xcit')


def load(name: str, **backbone) -> Config:
    """Config of a detector with few regions: 'swin', 'vit', or 'xcit' in Swin's."""
    cfg = Config.fromfile(VIT if name == 'vit' else SWIN)
    if name == 'xcit':
        cfg.model.backbone = ConfigDict(XCIT)
        cfg.model.neck.in_channels = [48] * 4
    cfg.model.backbone.update(backbone)
    cfg.model.train_cfg.rpn_proposal.update(nms_pre=100, max_per_img=24)
    cfg.model.test_cfg.rpn.update(nms_pre=100, max_per_img=16)
    return cfg


def build(cfg: Config) -> BaseDetector:
    """The detector of a config in training mode, with the same weights each time."""
    torch.manual_seed(0)
    return MODELS.build(cfg.model).train()


def make_batch(*sizes: tuple[int, int], seed: int = 0) -> dict:
    """8-bit photographs with two objects each, as a data loader gives them."""
    photos = [photograph(*size, seed + index) for index, size in enumerate(sizes)]
    return dict(
        inputs=[(60 * photo + 120).clamp(0, 255).byte() for photo in photos],
        data_samples=[sample(*size, num_classes=5) for size in sizes],
    )


def part_of(batch: dict, begin: int, count: int = 1) -> dict:
    """A batch of some of the images."""
    return {key: values[begin : begin + count] for key, values in batch.items()}


def compute_loss(model: BaseDetector, batch: dict) -> Tensor:
    """The total loss, with the same regions drawn each time."""
    torch.manual_seed(1)
    data = model.data_preprocessor(batch, training=True)
    return model.parse_losses(model(**data, mode='loss'))[0]


def gradients(model: BaseDetector) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def weights(model: BaseDetector) -> Tensor:
    """All parameters in one vector, a copy."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def build_averaging(cfg: Config) -> BaseDetector:
    """A detector whose loss of a batch is the mean of those of its images.

    As many regions of each are taken, none is drawn, and all count; the mask loss, an
    average over as many objects as are found, is left out. Batch norms keep their
    statistics.
    """
    train_cfg = cfg.model.train_cfg
    train_cfg.rpn_proposal.nms.iou_threshold = 1.0
    for part in (train_cfg.rpn, train_cfg.rcnn):
        part.sampler.num = 10**6
        part.assigner.update(pos_iou_thr=0.5, neg_iou_thr=0.5)
    cfg.model.roi_head.mask_head.loss_mask = dict(
        type='CrossEntropyLoss', use_mask=True, loss_weight=0.0
    )
    model = build(cfg)
    for norm in batch_norms(model):
        norm.eval()
    return model


def batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def set_up_run(cfg: Config, shapes: Path, work_dir: Path, iters: int = 3) -> Config:
    """Let a config train on some shapes for a few iterations, without validation."""
    for split in ('train', 'val', 'test'):
        dataset = cfg[f'{split}_dataloader'].dataset
        dataset.data_root = str(shapes)
        for transform in dataset.pipeline:
            if transform.type == 'Resize':
                transform.scale = (PIXELS, PIXELS)
    cfg.test_evaluator.ann_file = str(shapes / 'annotations/instances_val.json')
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=iters)
    cfg.param_scheduler = None
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', by_epoch=False, interval=iters
    )
    cfg.work_dir = str(work_dir)
    cfg.experiment_name = work_dir.name
    return cfg
