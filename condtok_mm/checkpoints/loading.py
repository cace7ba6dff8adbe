"""Load any checkpoint into any backbone, and say what became of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor, nn

from ..arguments import check_number
from .fitting import fit
from .layouts import LAYOUTS
from .reading import read_checkpoint
from .report import LoadReport
from .unwrapping import prefixes, strip, unwrap

MIN_MATCHED = 0.9
"""Least share of a backbone's keys that a checkpoint must have."""

ANCHORS = {'patch_embed', 'blocks', 'embeddings'}
"""First components of keys in the layouts, beside those of the backbone itself."""

COMPUTED = r'\.(relative_(position_index|coords_table)|attn_mask|freqs_(cos|sin))$'
"""Buffers that a backbone fills by itself, in the size that it needs."""

COUNTER = '.num_batches_tracked'
"""Buffer of a batch norm that files may lack."""

PRECONDITIONER = 'conditioner.preconditioner'
"""What a conditioner reads and checks itself, and is calibrated by."""

NOTHING = r'(?!)'
"""A pattern that no key matches."""


def convert_checkpoint(
    checkpoint: dict,
    backbone: nn.Module,
    prefix: str | None = None,
    new: str | None = None,
) -> tuple[dict[str, Tensor], LoadReport]:
    """Turn what a file holds into a state dict of a backbone.

    The layout, and where in the file the backbone lies, are recognised as those under
    which most of the backbone's keys are found. Converting the result again changes
    nothing.

    Args:
        checkpoint (dict): What the file holds, as :func:`read_checkpoint` returns it.
        backbone (nn.Module): What the weights are for. It is not changed.
        prefix (str, optional): Prefix of the backbone's keys in the file. Defaults to
            None, which recognises it.
        new (str, optional): Regular expression of keys that files need not have.
            Defaults to None, what :func:`install_checkpoint_reader` was told.

    Returns:
        tuple[dict[str, Tensor], LoadReport]: The state dict, with the keys that the
        backbone does not have at its end; and the report.

    Raises:
        ValueError: If the file holds no weights, or none with that prefix.
    """
    weights, wrapper = unwrap(checkpoint)
    if prefix is not None and not strip(weights, _with_dot(prefix)):
        raise ValueError(
            f'the checkpoint has no keys with the prefix {prefix!r}, only such as '
            f'{", ".join(list(weights)[:3])}.'
        )
    if new is None:
        reader = _reader(backbone)
        new = reader.new if reader else NOTHING
    return _convert(weights, wrapper, backbone, new, prefix)


def load_backbone(
    backbone: nn.Module,
    checkpoint: str,
    prefix: str | None = None,
    min_matched: float = MIN_MATCHED,
) -> LoadReport:
    """Read a checkpoint file safely and load it into a backbone.

    Args:
        backbone (nn.Module): Any backbone. Its weights are changed.
        checkpoint (str): File or URL, as for :func:`read_checkpoint`.
        prefix (str, optional): Prefix of the backbone's keys in the file. Defaults to
            None, which recognises it.
        min_matched (float): Least share of the backbone's keys that the file must
            have, in [0, 1]. Defaults to 0.9.

    Returns:
        LoadReport: What became of the keys. It is logged too.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file cannot be read safely, holds no weights, or too few
            keys match.
    """
    try:
        state_dict, report = convert_checkpoint(
            read_checkpoint(checkpoint), backbone, prefix
        )
        print_log(f'{checkpoint}\n{report}', logger='current', level=report.level)
        report.check(min_matched)
    except ValueError as error:
        raise ValueError(f'{checkpoint}: {error}') from None
    with _converted(backbone):
        backbone.load_state_dict(state_dict, strict=False)
    return report


def install_checkpoint_reader(
    backbone: nn.Module, min_matched: float = MIN_MATCHED, new: str = NOTHING
) -> nn.Module:
    """Let a backbone load checkpoints of any layout, however they reach it.

    ``load_state_dict``, mmengine's runner and its ``load_checkpoint`` convert, resize
    and report what they load, as part of a detector too; ``init_cfg`` with a
    checkpoint also reads the file without executing anything in it.

    Args:
        backbone (nn.Module): The backbone. It is changed in place.
        min_matched (float): Least share of its keys that a checkpoint must have, in
            [0, 1]. Defaults to 0.9.
        new (str): Regular expression of keys that files of pretrained backbones need
            not have, as detection adds them. Defaults to one that no key matches.

    Returns:
        nn.Module: The backbone.

    Raises:
        TypeError: If ``min_matched`` is not a number.
        ValueError: If it is out of range.
    """
    check_number('min_matched', min_matched, '[0, 1]')
    handle = backbone._register_load_state_dict_pre_hook(
        _Reader(min_matched, new), with_module=True
    )
    # Before the hooks of the stock class, which know its own layout alone.
    hooks = backbone._load_state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)
    if isinstance(backbone, BaseModule):
        backbone.init_weights = _InitWeights(backbone, min_matched)
    return backbone


class _Reader:
    """Load-state-dict hook that converts, reports and checks."""

    def __init__(self, min_matched: float, new: str) -> None:
        self.min_matched = min_matched
        self.new = new
        self.active = True

    def __call__(
        self, backbone: nn.Module, state_dict: dict, prefix: str, *args
    ) -> None:
        if not self.active:
            return
        inside = strip(state_dict, prefix)
        weights, wrapper = unwrap(inside) if inside else ({}, '')
        converted, report = _convert(weights, wrapper, backbone, self.new)
        report.found_under = prefix + report.found_under
        print_log(str(report), logger='current', level=report.level)
        report.check(self.min_matched)
        for key in inside:
            state_dict.pop(prefix + key, None)
        state_dict.update({prefix + key: value for key, value in converted.items()})


@contextmanager
def _converted(backbone: nn.Module) -> Iterator[None]:
    """Load what has been converted and reported already."""
    reader = _reader(backbone)
    if reader:
        reader.active = False
    try:
        yield
    finally:
        if reader:
            reader.active = True


class _InitWeights:
    """Stands in for a backbone's ``init_weights`` and reads checkpoints itself.

    An object and not a closure, so that the backbone can be copied and pickled.
    """

    def __init__(self, backbone: BaseModule, min_matched: float) -> None:
        self.backbone = backbone
        self.min_matched = min_matched

    def __call__(self) -> None:
        backbone = self.backbone
        cfgs = backbone.init_cfg or []
        cfgs = [cfgs] if isinstance(cfgs, dict) else list(cfgs)
        pretrained = [cfg for cfg in cfgs if 'checkpoint' in cfg]
        if not pretrained:
            type(backbone).init_weights(backbone)
            return
        if backbone.is_init:
            # Logs that it was called more than once, and reads nothing.
            BaseModule.init_weights(backbone)
            return
        all_cfgs = backbone.init_cfg
        backbone.init_cfg = [cfg for cfg in cfgs if cfg not in pretrained]
        try:
            BaseModule.init_weights(backbone)
        finally:
            backbone.init_cfg = all_cfgs
        for cfg in pretrained:
            arguments = {
                key: cfg[key] for key in cfg if key not in ('type', 'map_location')
            }
            load_backbone(backbone, **arguments, min_matched=self.min_matched)


def _reader(backbone: nn.Module) -> _Reader | None:
    for hook in backbone._load_state_dict_pre_hooks.values():
        if isinstance(hook.hook, _Reader):
            return hook.hook
    return None


def _with_dot(prefix: str | None) -> str:
    return prefix if not prefix or prefix.endswith('.') else f'{prefix}.'


def _convert(
    weights: dict[str, Tensor],
    wrapper: str,
    backbone: nn.Module,
    new: str,
    prefix: str | None = None,
) -> tuple[dict[str, Tensor], LoadReport]:
    """Try every layout under every prefix, and take what fits best."""
    target = backbone.state_dict()
    expected = {key for key in target if not re.search(new, key)}
    candidates = [_with_dot(prefix)]
    if prefix is None:
        anchors = ANCHORS | {key.split('.')[0] for key in target}
        candidates = list(prefixes(weights, anchors))
    best, found, places = -1, (candidates[0], LAYOUTS[0], {}), []
    for candidate in candidates:
        inside = strip(weights, candidate)
        for layout in LAYOUTS:
            if layout.matches(inside):
                converted = layout.convert(inside)
                score = len(expected & converted.keys())
                if score > best:
                    best, found, places = score, (candidate, layout, converted), []
                if score == best and candidate not in places:
                    places.append(candidate)
    candidate, layout, converted = found
    under = '.'.join(filter(None, (wrapper, candidate.rstrip('.'))))
    report = LoadReport(type(backbone).__name__, layout.name, under)
    fitted, report.resized, report.notes = fit(converted, target, backbone)
    if best > 0 and len(places) > 1:
        others = ', '.join(repr(place) for place in places if place != candidate)
        report.notes.append(f'Also found under {others}: init_cfg.prefix chooses.')
    if layout is not LAYOUTS[0]:
        fitted = {k: v for k, v in fitted.items() if not re.search(COMPUTED, k)}
    return _settle(
        fitted, target, new, report, hasattr(backbone, 'conditioner')
    ), report


def _settle(
    weights: dict[str, Tensor],
    target: dict[str, Tensor],
    new: str,
    report: LoadReport,
    has_conditioner: bool,
) -> dict[str, Tensor]:
    """Enter every key into the report, and order the weights as the backbone does."""
    settled, zeros = {}, 0
    for key, value in target.items():
        found = weights.get(key)
        if re.search(COMPUTED, key) or (found is None and key.endswith(COUNTER)):
            settled[key] = value
        elif found is None and _needs_no_bias(key, weights):
            settled[key] = torch.zeros_like(value)
            report.missing.append(key)
            zeros += 1
        elif found is None:
            (report.new if re.search(new, key) else report.missing).append(key)
        elif found.shape == value.shape:
            settled[key] = found
            report.matched.append(key)
        else:
            report.missing.append(key)
            report.mismatched[key] = tuple(found.shape), tuple(value.shape)
    if zeros:
        report.notes.append(f'{zeros} biases that the file does not have set to zero.')
    for key, found in weights.items():
        if key not in target:
            settled[key] = found
            if not re.search(COMPUTED, key):
                report.unexpected.append(key)
    if PRECONDITIONER in report.unexpected and has_conditioner:
        report.unexpected.remove(PRECONDITIONER)
        report.notes.append('Calibrated: the conditioner applies one P to all images.')
    parts = {key.split('.')[0] for key in target}
    report.foreign = [key for key in report.unexpected if key.split('.')[0] in parts]
    return settled


def _needs_no_bias(key: str, weights: dict[str, Tensor]) -> bool:
    """Whether a file has the layer of a bias, but trained it without one."""
    layer, _, name = key.rpartition('.')
    return name == 'bias' and f'{layer}.weight' in weights
