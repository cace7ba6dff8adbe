"""Time and memory of a config's backbone: stock, without and with conditioning."""

import argparse
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from mmengine.config import DictAction
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import condtok_mm
from condtok_mm.analysis import benchmark
from condtok_mm.analysis.markdown import markdown_table
from condtok_mm.conditioning import TokenConditioner
from condtok_mm.engine.checked import load_config, make_run_folder


@dataclass
class Row:
    """One backbone in one mode."""

    config: str
    variant: str
    mode: str
    seconds: float
    spread: float
    images_per_second: float
    peak_mib: float
    time_ratio: float
    memory_ratio: float
    gflops: float
    conditioning_share: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', nargs='+', help='config files')
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1344))
    parser.add_argument('--batch-size', type=int, default=1)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', choices=benchmark.DTYPES, default='fp32')
    parser.add_argument(
        '--modes', nargs='+', choices=benchmark.MODES, default=list(benchmark.MODES)
    )
    parser.add_argument('--rounds', type=int, default=5, help='rounds that count')
    parser.add_argument('--warmup', type=int, default=1, help='rounds before them')
    parser.add_argument(
        '--scaling',
        action='store_true',
        help="cost of the config's conditioner against N, D and batch instead",
    )
    parser.add_argument('--out-dir', default='work_dirs/benchmark')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        sys.exit(f'--device {args.device}: torch finds no CUDA GPU.')
    sizes = dict(rounds=[args.rounds], size=args.size, warmup=[args.warmup + 1])
    sizes['batch-size'] = [args.batch_size]
    for name, values in sizes.items():
        if min(values) < 1:
            sys.exit(f'--{name} is too small.')
    configs = {}
    for path in args.config:
        cfg = load_config(path, args.cfg_options)
        configs[Path(path).stem] = cfg.model.backbone.to_dict()
        try:
            torch.device(args.device)
            for backbone in benchmark.variants(configs[Path(path).stem]).values():
                benchmark.MODELS.build(dict(backbone))
        except Exception as error:
            sys.exit(f'{path} on {args.device}: {error}')
    name, backbone = next(iter(configs.items()))
    if args.scaling and backbone.get('conditioner') is None:
        sys.exit(f'{name} has no conditioner; give one of the condtok configs.')
    out_dir = make_run_folder(args.out_dir)
    setting = benchmark.Setting(
        tuple(args.size), args.batch_size, args.device, args.dtype
    )
    measure = measure_scaling if args.scaling else measure_backbones
    result, tables, plot = measure(args, configs, setting)
    report = dict(machine=machine(args.device), setting=asdict(setting), **result)
    (out_dir / 'benchmark.json').write_text(json.dumps(report, indent=2))
    (out_dir / 'benchmark.md').write_text(
        '\n\n'.join(map(markdown_table, tables)) + '\n'
    )
    plot(out_dir / 'benchmark.png')
    console = Console()
    for table in tables:
        console.print(table)
    print(f'written: {out_dir}/benchmark.json, benchmark.md and benchmark.png')


def machine(device: str) -> dict:
    """What the numbers depend on."""
    on_cuda = device.startswith('cuda')
    return dict(
        device=torch.cuda.get_device_name(device) if on_cuda else platform.processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        condtok_mm=condtok_mm.__version__,
    )


def measure_backbones(args, configs: dict, setting: benchmark.Setting):
    rows = []
    variants = {name: benchmark.variants(cfg) for name, cfg in configs.items()}
    turns = args.warmup + args.rounds
    with Progress() as progress:
        count = sum(map(len, variants.values())) + len(configs) * turns
        task = progress.add_task('benchmark', total=len(args.modes) * count)

        def advance(text: str | None = None) -> None:
            progress.update(task, advance=1, description=text)

        for mode in args.modes:
            for name, backbones in variants.items():
                rows += measure_variants(name, backbones, setting, mode, args, advance)
    size = ' x '.join(map(str, setting.size))
    where = f'{size}, batch {setting.batch}, {setting.device}, {setting.dtype}'
    tables = [
        backbone_table([row for row in rows if row.config == name], f'{name}: {where}')
        for name in configs
    ]
    result = dict(rows=[asdict(row) for row in rows])
    return result, tables, lambda path: plot_rows(rows, path)


def measure_variants(name, backbones, setting, mode, args, advance) -> list[Row]:
    peaks = {}
    for variant, cfg in backbones.items():
        advance(f'{mode}: memory of {variant}')
        peaks[variant] = benchmark.peak_memory(cfg, setting, mode)
    models = {
        variant: benchmark.build(cfg, setting, mode)
        for variant, cfg in backbones.items()
    }
    images = setting.images()
    functions = {
        variant: benchmark.step(model, images, setting, mode)
        for variant, model in models.items()
    }
    if 'conditioned' in models:
        functions['conditioning'] = benchmark.conditioning_step(
            models['conditioned'], images, setting, mode
        )
    seconds = benchmark.time_in_turn(
        functions,
        setting.device,
        args.rounds,
        args.warmup,
        lambda: advance(f'{mode}: timing {name}'),
    )
    medians = {variant: benchmark.spread(times) for variant, times in seconds.items()}
    base = next(iter(models))
    rows = []
    for variant, model in models.items():
        median, width = medians[variant]
        share = 0.0
        if variant == 'conditioned':
            share = medians['conditioning'][0] / median
        rows.append(
            Row(
                config=name,
                variant=variant,
                mode=mode,
                seconds=median,
                spread=width,
                images_per_second=setting.batch / median,
                peak_mib=peaks[variant],
                time_ratio=median / medians[base][0],
                memory_ratio=peaks[variant] / peaks[base],
                gflops=benchmark.forward_flops(model, images) / 1e9,
                conditioning_share=share,
            )
        )
    return rows


def backbone_table(rows: list[Row], title: str) -> Table:
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption='x: times the first backbone in the same run; share: of conditioning',
    )
    table.add_column('backbone', no_wrap=True)
    for column in ('s', '+-', 'x', 'img/s', 'MiB', 'x', 'GFLOPs', 'share'):
        table.add_column(column, justify='right', no_wrap=True)
    for row in rows:
        table.add_row(
            f'{row.mode}: {row.variant}',
            f'{row.seconds:#.3g}',
            f'{row.spread:.1g}',
            f'{row.time_ratio:.2f}',
            f'{row.images_per_second:.3g}',
            f'{row.peak_mib:.0f}',
            f'{row.memory_ratio:.2f}',
            f'{row.gflops:.3g}',
            f'{100 * row.conditioning_share:.2g} %' if row.conditioning_share else '',
        )
    return table


def plot_rows(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 1.5 + 0.4 * len(rows)), layout='constrained')
    for axes, values, label in zip(
        figure.subplots(1, 2, sharey=True),
        ([row.seconds for row in rows], [row.peak_mib for row in rows]),
        ('seconds a step', 'peak memory, MiB'),
        strict=True,
    ):
        colors = dict(stock='tab:gray', off='tab:cyan', conditioned='tab:blue')
        names = [f'{row.config}\n{row.variant}, {row.mode}' for row in rows]
        errors = [row.spread for row in rows] if label.startswith('seconds') else None
        bars = axes.barh(
            names, values, xerr=errors, color=[colors[row.variant] for row in rows]
        )
        axes.bar_label(bars, fmt='{:,.4g}', padding=3)
        axes.set_xlabel(label)
        axes.margins(x=0.2)
        axes.tick_params(axis='y', labelsize=6)
    axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def measure_scaling(args, configs: dict, setting: benchmark.Setting):
    """Time the conditioner alone on random tokens."""
    backbone = next(iter(configs.values()))
    conditioner = TokenConditioner(**backbone['conditioner']).to(args.device)
    sweeps = {
        'tokens N': [(1, n, 96) for n in (8400, 16800, 33600, 50400, 67200)],
        'batch': [(b, 4096, 384) for b in (1, 2, 3, 4, 6)],
        'channels D': [(1, 4096, d) for d in (96, 192, 384, 768, 1024)],
    }
    functions, generator = {}, torch.Generator().manual_seed(0)
    for shape in {shape for shapes in sweeps.values() for shape in shapes}:
        tokens = torch.randn(shape, generator=generator).to(args.device)
        functions[shape] = lambda tokens=tokens: conditioner(tokens)
    with Progress() as progress:
        task = progress.add_task('scaling', total=args.warmup + args.rounds)
        seconds = benchmark.time_in_turn(
            functions,
            args.device,
            args.rounds,
            args.warmup,
            lambda: progress.advance(task),
        )
    points, tables = {}, []
    for variable, shapes in sweeps.items():
        axis = ('batch', 'tokens N', 'channels D').index(variable)
        x = [shape[axis] for shape in shapes]
        y = [benchmark.spread(seconds[shape])[0] for shape in shapes]
        start, slope, fit = benchmark.line_fit(x, y)
        points[variable] = dict(
            shapes=shapes, seconds=y, slope=slope, start=start, r2=fit
        )
        caption = (
            f'line: {1e3 * start:.3g} ms + {1e6 * slope:.3g} us each, R^2 {fit:.4f}'
        )
        table = Table(title=f'{conditioner}: {variable}', caption=caption)
        for column in ('B x N x D', 'ms'):
            table.add_column(column, justify='right')
        for shape, value in zip(shapes, y, strict=True):
            table.add_row(' x '.join(map(str, shape)), f'{1e3 * value:.3g}')
        tables.append(table)
    return dict(scaling=points), tables, lambda path: plot_scaling(points, path)


def plot_scaling(points: dict, path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 3.5), layout='constrained')
    for axes, (variable, data) in zip(
        figure.subplots(1, 3), points.items(), strict=True
    ):
        axis = ('batch', 'tokens N', 'channels D').index(variable)
        x = [shape[axis] for shape in data['shapes']]
        axes.plot(x, [1e3 * value for value in data['seconds']], 'o', color='tab:blue')
        line = [1e3 * (data['start'] + data['slope'] * value) for value in x]
        axes.plot(x, line, color='tab:gray', label=f'line, R² {data["r2"]:.3f}')
        axes.set(xlabel=variable, ylabel='ms', ylim=(0, None))
        axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == '__main__':
    main()
