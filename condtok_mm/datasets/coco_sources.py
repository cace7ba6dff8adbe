"""The COCO files that a config reads, and how its loaders read them."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.fileio import join_path
from mmengine.utils import is_abs

from .checks import type_name, typed_nodes

READING = ('__init__', 'load_data_list', 'parse_data_info', 'filter_data')
"""Methods of CocoDataset that decide what is learnt from a file."""


@dataclass
class CocoSource:
    """One annotation file and the way it is read.

    Attributes:
        keys (list[str]): Where the config says so.
        dataset (str): Class that reads it.
        ann_file (str): The file, joined with ``data_root``.
        data_root (str): Folder that the config names.
        image_folder (str | None): Where the images are; None if it is not said.
        classes (Sequence[str]): Names in ``metainfo``, unchecked.
        default_classes (bool): Whether they are those of the class.
        trains (bool): Whether its objects are trained on.
        evaluated (bool): Whether an evaluator reads the file too.
        masks (bool): Whether masks are loaded.
        poly2mask (bool): Whether they become bitmaps.
        filter_cfg (dict): What is left out.
        load_image (dict): Config of the transform that reads images.
        backend_args (dict | None): How files are accessed.
        free_labels (bool): Whether the class names are an input of the model, so that
            its heads have no classes of their own.
    """

    keys: list[str]
    dataset: str
    ann_file: str
    data_root: str
    image_folder: str | None
    classes: Sequence[str]
    default_classes: bool
    trains: bool
    evaluated: bool
    masks: bool
    poly2mask: bool
    filter_cfg: dict
    load_image: dict
    backend_args: dict | None
    free_labels: bool


def find_sources(
    cfg: dict, loaders: Sequence[str]
) -> tuple[list[CocoSource], list[str]]:
    """Find the COCO files of a config, those inside other data sets too.

    Args:
        cfg (dict): A whole config.
        loaders (Sequence[str]): Such as ``train_dataloader``.

    Returns:
        tuple[list[CocoSource], list[str]]: The files, each once if it is read in the
        same way; and data sets that do not read as CocoDataset does, with their keys.
    """
    sources, unknown = [], []
    for loader in loaders:
        dataset = (cfg.get(loader) or {}).get('dataset')
        for key, node in _leaves(dataset, f'{loader}.dataset'):
            kind = node.get('type')
            kind = DATASETS.get(kind) if isinstance(kind, str) else kind
            if not _reads_as_coco(kind):
                unknown.append(f'{key} ({type_name(node)})')
                continue
            source = _read_node(key, node, kind)
            source.trains &= loader == 'train_dataloader'
            source.evaluated = source.ann_file in evaluator_files(cfg, loader)
            twins = (s for s in sources if _without_keys(s) == _without_keys(source))
            if twin := next(twins, None):
                twin.keys.append(key)
            else:
                sources.append(source)
    return sources, unknown


def evaluator_files(cfg: dict, loader: str) -> dict[str, dict | None]:
    """Find the annotation files that the metrics of a loader read by themselves.

    Args:
        cfg (dict): A whole config.
        loader (str): Such as ``val_dataloader``.

    Returns:
        dict[str, dict | None]: Files to how they are accessed.
    """
    metrics = typed_nodes(cfg.get(loader.replace('dataloader', 'evaluator')))
    return {m['ann_file']: m.get('backend_args') for m in metrics if m.get('ann_file')}


def _leaves(node: object, key: str) -> Iterator[tuple[str, dict]]:
    """Data sets below one that may wrap others, with their keys."""
    if not isinstance(node, dict):
        return
    if 'dataset' in node:
        yield from _leaves(node['dataset'], f'{key}.dataset')
    elif 'datasets' in node:
        for index, child in enumerate(node['datasets']):
            yield from _leaves(child, f'{key}.datasets.{index}')
    elif 'type' in node:
        yield key, node


def _reads_as_coco(kind: type | None) -> bool:
    return (
        isinstance(kind, type)
        and issubclass(kind, CocoDataset)
        and all(getattr(kind, name) is getattr(CocoDataset, name) for name in READING)
    )


def _read_node(key: str, node: dict, kind: type[CocoDataset]) -> CocoSource:
    root = node.get('data_root') or ''
    metainfo = node.get('metainfo')
    folder = (node.get('data_prefix') or {}).get('img')
    steps = {type_name(step): step for step in typed_nodes(node.get('pipeline'))}
    annotations = steps.get('LoadAnnotations')
    load = annotations or {}
    return CocoSource(
        keys=[key],
        dataset=kind.__name__,
        ann_file=_join(root, path) if (path := node.get('ann_file')) else '',
        data_root=root,
        image_folder=None if folder is None else _join(root, folder),
        classes=kind._load_metainfo(copy.deepcopy(metainfo))['classes'],
        default_classes='classes' not in (metainfo or {}),
        trains=annotations is not None,
        evaluated=False,
        masks=load.get('with_mask', False),
        poly2mask=load.get('poly2mask', True),
        filter_cfg={} if node.get('test_mode') else node.get('filter_cfg') or {},
        load_image=steps.get('LoadImageFromFile', {'type': 'LoadImageFromFile'}),
        backend_args=node.get('backend_args'),
        free_labels=node.get('return_classes', False),
    )


def _join(root: str, path: str) -> str:
    return join_path(root, path) if root and not is_abs(path) else path


def _without_keys(source: CocoSource) -> dict:
    return {**vars(source), 'keys': None}
