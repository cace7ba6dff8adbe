"""What a config would train on, and what is wrong with it."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import track

from .coco_classes import UNUSED_CLASS, check_classes, describe_labels
from .coco_file import read_coco_file
from .coco_images import check_files, check_filter, check_image_ids
from .coco_objects import check_objects
from .coco_sources import CocoSource, find_sources
from .config_checks import check_evaluators, check_heads
from .findings import Findings, Kind

NOTHING_LEFT = Kind(
    'data sets without an image left to train on',
    'See what is left out above and below; mend the file or filter_cfg',
)
NO_OBJECTS = Kind(
    'data sets without an object left to train on',
    'Nothing would be learnt. See what is left out above and below; mend the file',
)

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


@dataclass
class DatasetReport:
    """What is known about one data set, or about the config.

    Attributes:
        title (str): Which one.
        summary (str): What it holds.
        labels (str): What its categories are called.
        failure (str): Why it cannot be checked at all.
        findings (Findings): What is wrong with it.
    """

    title: str
    summary: str = ''
    labels: str = ''
    failure: str = ''
    findings: Findings = field(default_factory=Findings)

    @property
    def failed(self) -> bool:
        """Whether training would fail or learn something wrong."""
        return bool(self.failure or self.findings.errors())

    def text(self) -> str:
        """Say all of it.

        Returns:
            str: Paragraphs, and a table if there are findings.
        """
        parts = [self.title, self.failure, self.summary, self.labels]
        if self.findings.counts:
            parts.append(self.findings.table())
        return '\n'.join(part for part in parts if part)


def check_datasets(
    cfg: dict,
    loaders: Sequence[str] = LOADERS,
    *,
    decode: bool = False,
    progress: bool = True,
) -> tuple[list[DatasetReport], list[str]]:
    """Check the data sets of a config in the format of COCO.

    Args:
        cfg (dict): A whole config of a detector.
        loaders (Sequence[str]): Loaders whose data sets are checked.
        decode (bool): Read every image and compare its size, instead of only looking
            for it.
        progress (bool): Show progress on a terminal.

    Returns:
        tuple[list[DatasetReport], list[str]]: Reports on each data set and, if there
        is something wrong with it, on the config; and data sets of another kind, that
        are not checked.
    """
    sources, unknown = find_sources(cfg, loaders)
    reports = [_check_source(source, decode, progress) for source in sources]
    config = DatasetReport('config')
    check_heads(cfg.get('model') or {}, sources, config.findings)
    check_evaluators(cfg, sources, config.findings)
    return reports + [config] * config.failed, unknown


def _check_source(source: CocoSource, decode: bool, progress: bool) -> DatasetReport:
    report = DatasetReport(f'{", ".join(source.keys)}: {source.ann_file}')
    findings = report.findings
    hidden = not progress or not sys.stdout.isatty()

    def watch(items: Iterable, total: int) -> Iterable:
        return track(items, source.keys[0], total, transient=True, disable=hidden)

    reading = Console().status(f'reading {escape(source.ann_file)}')
    try:
        with nullcontext() if hidden else reading:
            content = read_coco_file(source, findings)
    except ValueError as error:
        report.failure = str(error)
        return report
    kept = check_classes(source, content.categories, findings)
    images = check_image_ids(content.images, findings)
    objects = check_objects(
        source,
        watch(content.annotations, len(content.annotations)),
        images,
        {category['id'] for category in content.categories},
        {category['id'] for category in kept},
        findings,
    )
    total, left = objects.by_category.total(), list(images.values())
    report.summary = (
        f'{len(images)} images, {len(content.annotations)} annotations, '
        f'{total} objects of {len(kept)} classes'
    )
    if source.trains:
        left = check_filter(source, images, objects, findings)
        report.summary += f'; {len(left)} images are trained on'
        if not left:
            findings.add(NOTHING_LEFT, source.ann_file)
        elif not total:
            findings.add(NO_OBJECTS, source.ann_file)
        for category in kept if total else ():
            if not objects.by_category[category['id']]:
                findings.add(UNUSED_CLASS, category['name'])
    check_files(source, left, findings, decode, watch)
    report.labels = describe_labels(kept, source.classes, objects.by_category)
    return report
