"""Time, memory and work of backbones, and the conditioner's share of them.

A timing is compared with another one only where both were taken in turn in one run.
"""

import gc
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from mmdet.registry import MODELS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..conditioning.attach import conditioned_layer

DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
MODES = ('train', 'inference')
STOCK = {
    'CondTokSwinTransformer': ('mmdet.SwinTransformer', {}),
    'CondTokViT': ('mmpretrain.ViTSAM', dict(out_channels=0)),
}
"""Class to compare with, and arguments that make it compute the same."""
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass
class Setting:
    """What a benchmark runs on.

    Attributes:
        size (tuple[int, int]): Height and width of the images in pixels.
        batch (int): Images at a time.
        device (str): Device.
        dtype (str): Key of ``DTYPES``; below fp32 under autocast.
    """

    size: tuple[int, int]
    batch: int = 1
    device: str = 'cpu'
    dtype: str = 'fp32'

    def images(self) -> Tensor:
        """Random images (B, 3, H, W)."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(self.batch, 3, *self.size, generator=generator)
        return images.to(self.device)

    def autocast(self):
        """Context that runs a model in the dtype."""
        if self.dtype == 'fp32':
            return nullcontext()
        return torch.autocast(self.device.split(':')[0], DTYPES[self.dtype])


def variants(backbone: dict) -> dict[str, dict]:
    """Configs of a backbone to compare: stock, and with and without conditioning.

    Args:
        backbone (dict): Config of a backbone.

    Returns:
        dict[str, dict]: 'stock', where the class has a stock one, 'off' and
        'conditioned', as far as they differ from the config.
    """
    backbone = {key: value for key, value in backbone.items() if key != 'init_cfg'}
    kind = backbone['type'].rpartition('.')[2]
    if kind not in STOCK:
        return {'stock': backbone}
    own = {k: v for k, v in backbone.items() if k not in ('conditioner', 'attn')}
    name, extra = STOCK[kind]
    found = {'stock': own | dict(type=name) | _sam_arch(own, kind) | extra}
    found['off'] = backbone | dict(conditioner=None)
    if backbone.get('conditioner') is not None:
        found['conditioned'] = backbone
    return found


def _sam_arch(backbone: dict, kind: str) -> dict:
    """ViTSAM knows fewer presets and names no default for the global blocks."""
    if kind != 'CondTokViT':
        return {}
    from ..models.backbones.vit import arch_settings  # noqa: PLC0415

    return dict(arch=arch_settings(backbone.get('arch', 'base')))


def build(backbone: dict, setting: Setting, mode: str) -> nn.Module:
    """Build a backbone for a run.

    Args:
        backbone (dict): Its config.
        setting (Setting): What it runs on.
        mode (str): 'train' or 'inference'.

    Returns:
        nn.Module: The backbone, with the weights of seed 0.
    """
    torch.manual_seed(0)
    model = MODELS.build(dict(backbone)).to(setting.device)
    model.train(mode == 'train')
    return model


def step(model: nn.Module, images: Tensor, setting: Setting, mode: str) -> Callable:
    """Make a function that does one step.

    Args:
        model (nn.Module): The backbone.
        images (Tensor): Images. Has shape (B, 3, H, W).
        setting (Setting): What it runs on.
        mode (str): 'train', forward and backward, or 'inference'.

    Returns:
        Callable: The function.
    """

    def train() -> None:
        with setting.autocast():
            loss = sum(out.float().mean() for out in model(images))
        loss.backward()
        model.zero_grad()

    @torch.no_grad()
    def infer() -> None:
        with setting.autocast():
            model(images)

    return train if mode == 'train' else infer


def conditioning_step(
    model: nn.Module, images: Tensor, setting: Setting, mode: str
) -> Callable:
    """Make a function that does what conditioning adds to a step.

    Finding the padding, the correction and, in training, its backward pass.

    Args:
        model (nn.Module): A backbone with a conditioner.
        images (Tensor): Images. Has shape (B, 3, H, W).
        setting (Setting): What it runs on.
        mode (str): 'train' or 'inference'.

    Returns:
        Callable: The function.
    """
    forward = conditioned_layer(model).forward
    training = mode == 'train'
    with torch.no_grad():
        output = forward.embed(images)
        tokens = forward.tokens(images, output)[0].contiguous()
    tokens.requires_grad_(training)
    grad = torch.ones_like(tokens)

    def run() -> None:
        with torch.set_grad_enabled(training), setting.autocast():
            embedded = (tokens, *output[1:]) if isinstance(output, tuple) else output
            _, valid = forward.tokens(images, embedded)
            conditioned = forward.conditioner(tokens, valid)
        if training:
            conditioned.backward(grad)
            tokens.grad = None

    return run


def time_in_turn(
    functions: dict[str, Callable], device: str, rounds: int, warmup: int, report=None
) -> dict[str, list[float]]:
    """Time functions, one after the other in each round.

    Args:
        functions (dict[str, Callable]): What to time.
        device (str): Device that they run on.
        rounds (int): Rounds that count.
        warmup (int): Rounds before them.
        report (Callable, optional): Called after each round. Defaults to None.

    Returns:
        dict[str, list[float]]: Seconds of each round.
    """
    seconds = {name: [] for name in functions}
    for turn in range(warmup + rounds):
        for name, function in functions.items():
            _synchronise(device)
            start = time.perf_counter()
            function()
            _synchronise(device)
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
        if report:
            report()
    return seconds


def _synchronise(device: str) -> None:
    if device.startswith('cuda'):
        torch.cuda.synchronize(device)


def spread(seconds: list[float]) -> tuple[float, float]:
    """Median, and half the distance between the quartiles.

    Args:
        seconds (list[float]): Timings.

    Returns:
        tuple[float, float]: Both in seconds; the second is 0 for a single timing.
    """
    if len(seconds) == 1:
        return seconds[0], 0.0
    low, median, high = statistics.quantiles(seconds, n=4, method='inclusive')
    return median, (high - low) / 2


def peak_memory(backbone: dict, setting: Setting, mode: str) -> float:
    """Memory that one step needs beside the weights and the images.

    On CPU it is the growth of the resident set of a process of its own (Linux); on CUDA
    what the allocator handed out.

    Args:
        backbone (dict): Config of the backbone.
        setting (Setting): What it runs on.
        mode (str): 'train' or 'inference'.

    Returns:
        float: MiB; nan where the system does not tell.
    """
    if setting.device.startswith('cuda'):
        return _peak(backbone, setting, mode)
    with ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(_peak, backbone, setting, mode).result()


def _peak(backbone: dict, setting: Setting, mode: str) -> float:
    import condtok_mm  # noqa: F401, PLC0415

    on_cuda = setting.device.startswith('cuda')
    run = step(build(backbone, setting, mode), setting.images(), setting, mode)
    gc.collect()
    if on_cuda:
        run()
        torch.cuda.reset_peak_memory_stats(setting.device)
        before = torch.cuda.memory_allocated(setting.device)
        run()
        return (torch.cuda.max_memory_allocated(setting.device) - before) / 2**20
    before = _resident_peak()
    run()
    return (_resident_peak() - before) / 2**10


def _resident_peak() -> float:
    """Peak of this process's resident set in KiB."""
    status = Path('/proc/self/status')
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith('VmHWM:'):
            return float(line.split()[1])
    return float('nan')


def forward_flops(model: nn.Module, images: Tensor) -> int:
    """Floating point operations of matrix products and convolutions, two a product.

    Args:
        model (nn.Module): The backbone. It is put into evaluation mode.
        images (Tensor): Images. Has shape (B, 3, H, W).

    Returns:
        int: Operations of one forward pass.
    """
    counter = FlopCounterMode(display=False, custom_mapping={CPU_FLASH: _flash_flops})
    model.eval()
    with torch.no_grad(), counter:
        model(images)
    return counter.get_total_flops()


def _flash_flops(query, key, value, *args, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)


def line_fit(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Least-squares line.

    Args:
        x (list[float]): Abscissae.
        y (list[float]): Ordinates.

    Returns:
        tuple[float, float, float]: Intercept, slope and the coefficient of
        determination R^2.
    """
    slope, intercept = statistics.linear_regression(x, y)
    return intercept, slope, statistics.correlation(x, y) ** 2
