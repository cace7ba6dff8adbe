"""Where a detector's config contradicts its data sets."""

from collections.abc import Iterator, Sequence
from os.path import realpath

from mmengine.fileio import exists

from .coco_sources import CocoSource, evaluator_files
from .findings import Findings, Kind

NUM_CLASSES = Kind(
    'heads with another number of classes than the data set',
    'Training stops, or never learns the rest. Set num_classes to the number of '
    'metainfo.classes',
)
OTHER_FILE = Kind(
    'evaluators with another annotation file than their data set',
    'The evaluation stops or is wrong. Set its ann_file to that of the data set',
)
NO_EVALUATOR_FILE = Kind(
    'evaluators whose annotation file does not exist',
    'Training stops when they are built. Set ann_file',
)

NOT_OF_THE_DATASET = ('backbone', 'rpn_head', 'semantic_head')
"""Parts of a detector whose classes are others than those of its objects."""


def check_heads(model: dict, sources: Sequence[CocoSource], findings: Findings) -> None:
    """Compare every ``num_classes`` of a detector with its data sets.

    Args:
        model (dict): Config of the detector.
        sources (Sequence[CocoSource]): What it reads.
        findings (Findings): Where faults are noted.
    """
    numbers = dict(_num_classes(model, 'model'))
    for source in sources:
        classes = source.classes
        if source.free_labels or not isinstance(classes, list | tuple):
            continue
        default = f', the default of {source.dataset}' * source.default_classes
        for key, number in list(numbers.items()):
            if number != len(classes):
                name = f'{source.keys[0]} has {len(classes)} classes{default}'
                findings.add(NUM_CLASSES, f'{key}={number}, but {name}')
                del numbers[key]


def check_evaluators(
    cfg: dict, sources: Sequence[CocoSource], findings: Findings
) -> None:
    """Compare the annotation files of evaluators with those of their loaders.

    Args:
        cfg (dict): A whole config.
        sources (Sequence[CocoSource]): What its loaders read.
        findings (Findings): Where faults are noted.
    """
    for split in ('val', 'test'):
        prefix = f'{split}_dataloader.'
        files = {
            source.ann_file
            for source in sources
            if any(key.startswith(prefix) for key in source.keys)
        }
        named = evaluator_files(cfg, f'{split}_dataloader') if files else {}
        for path, backend_args in named.items():
            name = f'{split}_evaluator.ann_file={path}'
            if not exists(path, backend_args=backend_args):
                findings.add(NO_EVALUATOR_FILE, name)
            # One evaluator of several data sets reads a merged file.
            elif len(files) == 1 and realpath(path) != realpath(*files):
                findings.add(OTHER_FILE, f'{name}, but {prefix}dataset: {min(files)}')


def _num_classes(node: object, key: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, list | tuple):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    for name, child in node.items():
        if name in ('num_classes', 'num_things_classes'):
            yield f'{key}.{name}', child
        elif name not in NOT_OF_THE_DATASET:
            yield from _num_classes(child, f'{key}.{name}')
