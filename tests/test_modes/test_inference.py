"""Ways to test: each finds what ``test_step`` of the detector finds."""

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import cv2
import mmdet
import pytest
import torch
from mmcv.ops import batched_nms
from mmdet.apis import inference_detector, init_detector
from mmdet.registry import DATASETS
from mmdet.structures.bbox import bbox_flip
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.runner import Runner
from mmengine.structures import InstanceData

from condtok_mm.datasets import make_shapes

from ..test_tools import run
from .detectors import NAMES, build, load, make_batch, part_of, set_up_run

FIELDS = ('bboxes', 'scores', 'labels', 'masks')


def assert_same(one, other, rtol=1e-5, atol=1e-4, pixels=0.0):
    """Whether two results hold the same detections, masks but for a share of pixels."""
    assert len(one) == len(other) > 0
    for field in FIELDS[:3]:
        torch.testing.assert_close(one[field], other[field], rtol=rtol, atol=atol)
    assert (one.masks != other.masks).float().mean() <= pixels


def detect(model, batch):
    """The detections in each image."""
    with torch.no_grad():
        return [sample.pred_instances for sample in model.test_step(batch)]


@pytest.mark.parametrize('name', NAMES)
def test_images_of_a_batch_are_found_as_alone(name):
    """Three sizes that are padded to the same one, alone or together."""
    sizes = ((64, 50), (41, 64), (64, 64))
    model = build(load(name)).eval()
    batch = make_batch(*sizes)
    together = detect(model, batch)
    alone = [detect(model, part_of(batch, index))[0] for index in range(3)]
    model.backbone.conditioner.strength = 0
    stock = detect(model, batch)
    for size, mine, single, off in zip(sizes, together, alone, stock, strict=True):
        assert mine.masks.shape[1:] == size
        assert_same(mine, single, 1e-3, 1e-3, 1e-3)
        assert (mine.scores[:5] - off.scores[:5]).abs().max() > 1e-3


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Config and checkpoint of a detector within a warm-up, and what it finds."""
    folder = tmp_path_factory.mktemp('run')
    make_shapes(folder / 'shapes', num_train=4, num_val=3, progress=False)
    cfg = set_up_run(load('vit'), folder / 'shapes', folder / 'work', iters=2)
    cfg.custom_hooks = [dict(type='KappaWarmupHook', end=4, by_epoch=False)]
    cfg.dump(folder / 'warmup.py')
    runner = Runner.from_cfg(cfg)
    runner.train()
    cfg.custom_hooks = []
    cfg.dump(folder / 'detector.py')
    (folder / 'work/iter_2.pth').rename(folder / 'warmup.pth')
    model = runner.model.eval()
    model.backbone.conditioner.strength = 1
    state = torch.load(folder / 'warmup.pth', weights_only=False)
    state['meta'] = dict(
        cfg=(folder / 'detector.py').read_text(),
        dataset_meta=state['meta']['dataset_meta'],
    )
    state['state_dict'] = model.state_dict()
    torch.save(state, folder / 'detector.pth')
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    images = [pseudo_collate([dataset[index]]) for index in range(3)]
    found = {
        data['data_samples'][0].img_path: detect(model, data)[0] for data in images
    }
    return SimpleNamespace(folder=folder, model=model, images=images, found=found)


STOCK_USER = """
import sys
import torch
from mmdet.apis import DetInferencer, inference_detector, init_detector

*images, out = sys.argv[1:]
assert 'condtok_mm' not in sys.modules
quiet = dict(no_save_vis=True, return_datasamples=True)
alone = DetInferencer(weights='detector.pth', device='cpu', show_progress=False)
assert 'condtok_mm' in sys.modules
both = DetInferencer('detector.py', 'detector.pth', device='cpu', show_progress=False)
model = init_detector('detector.py', 'detector.pth', device='cpu')
found = dict(
    weights=alone(images, **quiet)['predictions'],
    inferencer=both(images, **quiet)['predictions'],
    detector=inference_detector(model, images))
assert model.dataset_meta['classes'][0] == 'disc'
torch.save({
    way: [(each.img_path, each.pred_instances.to_dict()) for each in samples]
    for way, samples in found.items()}, out)
"""


def test_apis_of_mmdet_know_the_package_by_its_config_alone(trained):
    """In a process that imports mmdet only."""
    images = list(trained.found)
    command = [sys.executable, '-W', 'ignore', '-c', STOCK_USER, *images, 'found.pth']
    done = subprocess.run(
        command, cwd=trained.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = torch.load(trained.folder / 'found.pth', weights_only=False)
    assert list(found) == ['weights', 'inferencer', 'detector']
    for samples in found.values():
        assert [path for path, _ in samples] == images
        for path, fields in samples:
            result = InstanceData(**{field: fields[field] for field in FIELDS})
            assert_same(result, trained.found[path], 1e-3, 1e-3, 1e-3)


def test_detector_from_within_a_warm_up_warns_until_its_strength_is_set(trained):
    image = next(iter(trained.found))
    config, checkpoint = (
        str(trained.folder / f'warmup.{end}') for end in ('py', 'pth')
    )
    model = init_detector(config, checkpoint, device='cpu')
    with pytest.warns(UserWarning, match=r'at conditioner strength 0\.5, but run at 1'):
        inference_detector(model, image)
    model = init_detector(config, checkpoint, device='cpu')
    model.backbone.conditioner.strength = 0.5
    trained.model.backbone.conditioner.strength = 0.5
    images = torch.randn(1, 3, 64, 64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings('error', message='the weights were saved')
        mine, expected = model.backbone(images), trained.model.backbone(images)
    trained.model.backbone.conditioner.strength = 1
    for feature, other in zip(mine, expected, strict=True):
        assert torch.equal(feature, other)


def test_test_time_augmentation_merges_what_both_views_show(trained):
    """Boxes alone: mmdet merges no masks."""
    folder = trained.folder
    run(
        folder,
        'test.py',
        'detector.py',
        'detector.pth',
        '--tta',
        '--out',
        'tta.pkl',
        '--work-dir',
        'tta',
        '--cfg-options',
        'model.roi_head.mask_head=None',
        'test_evaluator.metric=bbox',
    )
    results = pickle.loads((folder / 'tta.pkl').read_bytes())
    for data, result in zip(trained.images, results, strict=True):
        (image,), (sample,) = data['inputs'], data['data_samples']
        plain = trained.found[sample.img_path]
        (mirrored,) = detect(trained.model, dict(data, inputs=[image.flip(-1)]))
        flipped = bbox_flip(mirrored.bboxes, sample.ori_shape)
        views = [(flipped, mirrored), (plain.bboxes, plain)]
        boxes = torch.cat([boxes for boxes, _ in views])
        scores, labels = (
            torch.cat([found[field] for _, found in views])
            for field in ('scores', 'labels')
        )
        nms = dict(type='nms', iou_threshold=0.5)
        merged, kept = batched_nms(boxes, scores, labels, nms)
        found = result['pred_instances']
        count = min(len(kept), 100)
        assert len(found['scores']) == count > 0
        torch.testing.assert_close(
            found['scores'], merged[:count, 4], rtol=1e-3, atol=1e-4
        )
        assert torch.equal(found['labels'], labels[kept][:count])
        torch.testing.assert_close(
            found['bboxes'], merged[:count, :4], rtol=1e-3, atol=1e-2
        )


def test_training_images_are_browsed(trained):
    package = Path(mmdet.__file__).parent
    tools = (package / '.mim/tools', package.parent / 'tools')
    (tool,) = (
        path
        for folder in tools
        if (path := folder / 'analysis_tools/browse_dataset.py').is_file()
    )
    run(trained.folder, tool, 'detector.py', '--not-show', '--output-dir', 'browsed')
    cfg = Config.fromfile(trained.folder / 'detector.py')
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    for index in range(len(dataset)):
        sample = dataset[index]['data_samples']
        path = trained.folder / 'browsed' / Path(sample.img_path).name
        assert cv2.imread(str(path)).shape[:2] == sample.img_shape
