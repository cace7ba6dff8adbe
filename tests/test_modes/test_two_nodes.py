"""dist_train.sh and dist_test.sh over two machines, here two agents on loopback.

They share no folder that is written to.
"""

import json
import subprocess
from pathlib import Path

import pytest

from condtok_mm.datasets import make_shapes

from ..test_tools import ROOT, environment
from .detectors import PIXELS, SWIN

PORT = 29517
TIMEOUT = 600
CONFIG = """
_base_ = {base!r}
custom_imports = dict(
    imports=['condtok_mm', 'witness'], allow_failed_imports=False)
custom_hooks = [dict(type='Witness')]
train_pipeline = _base_.train_pipeline
train_pipeline[2].update(scale=({pixels}, {pixels}))
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
train_cfg = dict(max_epochs=1, val_interval=1)
model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None)
default_hooks = dict(logger=dict(interval=1))
val_evaluator = dict(collect_device='gpu')
test_evaluator = val_evaluator
"""
WITNESS = """
import hashlib
import json
import os

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class Witness(Hook):
    def before_train(self, runner):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(outputs['loss'].item())

    def after_train(self, runner):
        vector = torch.nn.utils.parameters_to_vector(runner.model.parameters())
        found = dict(
            world=runner.world_size,
            node=os.environ['GROUP_RANK'],
            losses=self.losses,
            weights=hashlib.sha256(vector.detach().numpy().tobytes()).hexdigest())
        with open(f'witness_{runner.rank}.json', 'w') as file:
            json.dump(found, file)
"""


def run_on_two_nodes(folders, script, *args):
    """Run a script on two nodes, each in a folder of its own; their exits and words."""
    nodes = []
    for rank, folder in enumerate(folders):
        variables = dict(
            NNODES='2',
            NODE_RANK=str(rank),
            MASTER_ADDR='127.0.0.1',
            PORT=str(PORT),
            OMP_NUM_THREADS='1',
        )
        variables['PYTHONPATH'] = str(folder.parent)
        with (folder / 'output.txt').open('w') as output:
            nodes.append(
                subprocess.Popen(
                    ['bash', ROOT / 'tools' / script, *map(str, args)],
                    cwd=folder,
                    env=environment(**variables),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        exits = [node.wait(timeout=TIMEOUT) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    return exits, [(folder / 'output.txt').read_text() for folder in folders]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp('nodes')
    make_shapes(root / 'shapes', num_train=8, num_val=2, progress=False)
    (root / 'witness.py').write_text(WITNESS)
    config = root / 'detector.py'
    config.write_text(CONFIG.format(base=str(SWIN), pixels=PIXELS))
    folders = [root / 'first', root / 'second']
    for folder in folders:
        (folder / 'data').mkdir(parents=True)
        (folder / 'data/shapes').symlink_to(root / 'shapes')
    exits, words = run_on_two_nodes(
        folders, 'dist_train.sh', config, 1, '--work-dir', 'work'
    )
    assert exits == [0, 0], '\n'.join(words)
    return config, folders, words


def files(folder: Path) -> set[str]:
    return {
        path.suffix
        for path in (folder / 'work').rglob('*')
        if path.is_file() and not path.is_symlink()
    }


def test_two_nodes_train_as_one(trained):
    _, (first, second), words = trained
    found = [
        json.loads((folder / f'witness_{rank}.json').read_text())
        for rank, folder in enumerate((first, second))
    ]
    assert [(each['world'], each['node']) for each in found] == [(2, '0'), (2, '1')]
    assert found[0]['weights'] == found[1]['weights']
    for losses in zip(*(each['losses'] for each in found), strict=True):
        assert losses[0] != losses[1]
        assert all(0 < loss < 100 for loss in losses)
    assert 'Epoch(train) [1][2/2]' in words[0]


def test_only_the_first_node_writes(trained):
    _, (first, second), words = trained
    assert {'.pth', '.json', '.log', '.py'} <= files(first)
    assert files(second) == set()
    assert 'Epoch(train)' not in words[1]
    assert words[0].count('images are trained on') == 1
    assert words[1].count('images are trained on') == 0


def test_two_nodes_test_as_they_validated(trained):
    config, folders, _ = trained
    (log,) = folders[0].glob('work/2*/vis_data/scalars.json')
    validated = json.loads(log.read_text().splitlines()[-1])
    checkpoint = folders[0] / 'work/epoch_1.pth'
    exits, words = run_on_two_nodes(
        folders, 'dist_test.sh', config, checkpoint, 1, '--work-dir', 'test'
    )
    assert exits == [0, 0], '\n'.join(words)
    (path,) = folders[0].glob('test/2*/2*.json')
    tested = json.loads(path.read_text())
    assert {'coco/bbox_mAP', 'coco/segm_mAP'} <= tested.keys()
    for key, value in tested.items():
        assert not key.startswith('coco/') or value == validated[key]


def test_a_node_does_not_wait_for_one_that_refuses(trained):
    """The first node holds a run already, which the second does not see."""
    config, folders, _ = trained
    exits, words = run_on_two_nodes(
        folders, 'dist_train.sh', config, 1, '--work-dir', 'work'
    )
    assert 0 not in exits
    assert 'work holds a run already (epoch_1.pth)' in words[0]
