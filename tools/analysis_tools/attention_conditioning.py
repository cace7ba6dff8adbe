"""Condition number of a model's attention by layer, without and with conditioning.

Compares the same weights with the conditioner off and on, or, with --against, two
models; and puts Proposition 4.2 of arXiv 2505.12789 to the test in every layer.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path

import cv2
import torch
from mmcv.transforms import Compose
from mmdet.utils import register_all_modules
from mmengine.config import Config
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from condtok_mm.analysis import TokenReport, measure_tokens
from condtok_mm.analysis.attention_conditioning import (
    LayerReport,
    ensure_conditioner,
    measure_layer,
    plot_attention,
    summarise_kappa,
    summarise_layer,
    summarise_layers,
)
from condtok_mm.analysis.attention_reading import attention_layers, read_attention
from condtok_mm.analysis.images import image_pipeline, load_image
from condtok_mm.engine.checked import (
    load_config,
    load_detector,
    make_run_folder,
    measuring_parser,
    select_images,
)

FORMATS = dict(mean='.2g', geometric='.2g', rank='.1f')
BOUNDS = dict(
    softmax='S X Wv, at most S x X x Wv',
    linear="X Wq Wk' X' X Wv, at most Wq x Wk x Wv x X^3",
)


@dataclass
class Subject:
    """A model to measure, at one strength of its conditioner."""

    config: str
    checkpoint: str | None
    detector: nn.Module
    pipeline: Compose
    strength: float
    tokens: list = field(default_factory=list)
    layers: dict[str, list[LayerReport]] = field(default_factory=dict)

    def embed(self, path: Path) -> tuple[Tensor, TokenReport]:
        """Load an image, and measure its embedded tokens."""
        self.detector.backbone.conditioner.strength = self.strength
        image = load_image(self.detector, self.pipeline, path)
        return image, measure_tokens(self.detector.backbone, image, path.name)

    def measure(
        self, image: Tensor, report: TokenReport, max_windows: int, advance: Callable
    ) -> None:
        """Measure the attention layers, one after the other."""
        backbone = self.detector.backbone
        backbone.conditioner.strength = self.strength
        self.tokens.append((report.kappa_after, report.rank))
        for layer in read_attention(backbone, image, max_windows):
            self.layers.setdefault(layer.name, []).append(measure_layer(layer))
            advance()

    def summary(self) -> dict:
        """What the report holds of this model."""
        layers = [summarise_layer(reports) for reports in self.layers.values()]
        kappa, rank = torch.tensor(self.tokens).double().T
        return dict(
            config=self.config,
            checkpoint=self.checkpoint,
            strength=self.strength,
            embedded_tokens=summarise_kappa(kappa, rank),
            layers=layers,
            all_layers=summarise_layers(layers),
        )


def parse_args() -> argparse.Namespace:
    parser = measuring_parser(__doc__, 'attention_conditioning')
    parser.add_argument(
        '--against',
        nargs=2,
        metavar=('CONFIG', 'CHECKPOINT'),
        help='the model to compare with; the same one, conditioner off, without',
    )
    parser.add_argument(
        '--max-windows',
        type=int,
        default=16,
        help='windows of a layer that are measured, evenly spaced (default 16)',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for name in ('max_images', 'max_windows'):
        if getattr(args, name) < 1:
            sys.exit(f'--{name.replace("_", "-")} must be at least 1.')
    register_all_modules()
    cfg = load_config(args.config, args.cfg_options)
    for checkpoint in (args.checkpoint, (args.against or [None, None])[1]):
        if checkpoint and not Path(checkpoint).is_file():
            sys.exit(f'checkpoint {checkpoint} does not exist.')
    out_dir = make_run_folder(args.out_dir)
    paths = select_images(args, cfg)
    subjects = find_subjects(args, cfg)
    measure(subjects, paths, args.max_windows)
    summaries = {name: subject.summary() for name, subject in subjects.items()}
    images = len(next(iter(subjects.values())).tokens)
    report = dict(images=images, max_windows=args.max_windows, models=summaries)
    (out_dir / 'attention.json').write_text(json.dumps(report, indent=2))
    plot_attention(summaries, out_dir / 'attention.png')
    console = Console()
    console.print(kappa_table(summaries, images))
    for kind in ('softmax', 'linear'):
        console.print(bound_table(summaries, kind))
    print(f'written: {out_dir}/attention.json, {out_dir}/attention.png')


def find_subjects(args: argparse.Namespace, cfg: Config) -> dict[str, Subject]:
    """What is compared, the baseline first."""
    this = build(args.config, args.checkpoint, cfg, args.device)
    if args.against:
        config, checkpoint = args.against
        other = build(config, checkpoint, load_config(config, None), args.device)
        names = [list(attention_layers(s.detector.backbone)) for s in (other, this)]
        if names[0] != names[1]:
            sys.exit(
                f'{config} has other attention layers than {args.config}; a comparison '
                'layer by layer needs the same ones.'
            )
        return dict(other=other, this=this)
    if this.strength == 0:
        sys.exit(
            f'{args.config} has no conditioner; use one of the condtok configs, or '
            'name the model to compare with by --against.'
        )
    return dict(off=replace(this, strength=0.0, tokens=[], layers={}), on=this)


def build(config: str, checkpoint: str | None, cfg: Config, device: str) -> Subject:
    detector = load_detector(cfg, checkpoint, device)
    try:
        attention_layers(detector.backbone)
        ensure_conditioner(detector.backbone)
    except ValueError as error:
        sys.exit(f'{config}: {error}')
    strength = detector.backbone.conditioner.strength
    return Subject(config, checkpoint, detector, image_pipeline(cfg), strength)


def measure(
    subjects: dict[str, Subject], paths: Sequence[Path], max_windows: int
) -> None:
    each = sum(len(attention_layers(s.detector.backbone)) for s in subjects.values())
    with Progress() as progress:
        task = progress.add_task('attention layers', total=each * len(paths))
        for place, path in enumerate(paths, 1):
            try:
                embedded = [subject.embed(path) for subject in subjects.values()]
            except (AssertionError, OSError, ValueError, cv2.error) as error:
                print(f'left out: {path} ({error}).', file=sys.stderr)
                embedded = []
            for subject, parts in zip(subjects.values(), embedded, strict=False):
                try:
                    subject.measure(*parts, max_windows, lambda: progress.advance(task))
                except ValueError as error:
                    sys.exit(f'{subject.config}: {error}')
            progress.update(task, completed=each * place)
    if not all(subject.tokens for subject in subjects.values()):
        sys.exit('no image could be measured.')


def kappa_table(summaries: dict[str, dict], images: int) -> Table:
    table = Table(
        title=f'condition number by layer, {images} images',
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption='over images, windows and heads: the mean, the geometric mean, the '
        'mean rank',
    )
    table.add_column('matrix', overflow='fold')
    columns = [(key, name) for key in FORMATS for name in summaries]
    for key, name in columns:
        table.add_column(f'{key[:4]}\n{name}', justify='right', no_wrap=True)

    def add(title: str, values: Callable[[dict], dict]) -> None:
        cells = [(values(summaries[name]).get(key), key) for key, name in columns]
        table.add_row(
            title, *('' if c is None else f'{c:{FORMATS[key]}}' for c, key in cells)
        )

    add('embedded tokens X', itemgetter('embedded_tokens'))
    names = [layer['layer'] for layer in next(iter(summaries.values()))['layers']]
    for matrix, title in (('attention', 'matrix S'), ('output', 'output S V')):
        table.add_section()
        table.add_row(f'[bold]attention {title}')
        for place, name in enumerate(names):
            add(f'{place + 1} {name}', lambda s, m=matrix, p=place: s['layers'][p][m])
        add('all layers', lambda s, m=matrix: s['all_layers'][m])
    return table


def bound_table(summaries: dict[str, dict], kind: str) -> Table:
    causes = Counter()
    for summary in summaries.values():
        for layer in summary['layers']:
            causes.update(layer[kind]['violations_by_unmet'])
    counts = ', '.join(f'{count} {cause}' for cause, count in causes.items() if count)
    table = Table(
        title=f'Proposition 4.2, {kind} attention: {BOUNDS[kind]}',
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption='geometric means; proven: cases that meet the conditions of the '
        f'proof; violations by the condition not met: {counts or "no violation"}',
    )
    table.add_column('layer', no_wrap=True)
    terms = list(next(iter(summaries.values()))['layers'][0][kind]['terms'])
    for name in ('left', *terms, 'bound', 'proven', 'violated'):
        table.add_column(name, justify='right', no_wrap=True)
    for name, summary in summaries.items():
        table.add_section()
        table.add_row(f'[bold]{name}')
        for place, layer in enumerate(summary['layers'], 1):
            check = layer[kind]
            sides = (check['kappa'], *check['terms'].values(), check['bound'])
            table.add_row(
                str(place),
                *(f'{value:.2g}' for value in sides),
                *(f'{check[key]}/{check["cases"]}' for key in ('proven', 'violations')),
            )
    return table


if __name__ == '__main__':
    main()
