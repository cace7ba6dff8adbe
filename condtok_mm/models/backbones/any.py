"""Any registered backbone with conditioned tokens."""

import difflib
import inspect
import re
from collections.abc import Callable

from mmengine.registry import MODELS, DefaultScope
from torch import nn

from ...arguments import check_type, shown
from ...checkpoints import MIN_MATCHED, install_checkpoint_reader
from ...conditioning import TokenConditioner
from ...registry import register
from .install import install_conditioner

SCOPES = ('mmdet', 'mmpretrain')
"""Where backbones are looked up, after the scope in use."""
EMBEDDING = re.compile('patch_?embed|tokens_to_token|patch_conv', re.IGNORECASE)
"""What patch embeddings are called, as a class or as an attribute."""


@register('MODELS')
def CondTok(  # noqa: N802
    backbone: dict,
    embed: str | None = None,
    conditioner: dict | TokenConditioner | None = None,
    min_matched: float = MIN_MATCHED,
) -> nn.Module:
    """Build any registered backbone, with a conditioner behind its patch embedding.

    What is built is the stock backbone itself: its class, its parameters and its
    state-dict keys. With ``conditioner=None`` its forward is untouched; checkpoints are
    converted and checked all the same.

    Args:
        backbone (dict): Config of the backbone. Its ``type`` is looked up in the
            default scope, then in mmdet, then in mmpretrain; a prefix, as in
            'mmpretrain.SwinTransformer', or a class decides. Layers inside it are
            looked up in its own scope.
        embed (str, optional): Dotted name of the layer whose output is conditioned, as
            :func:`condtok_mm.conditioning.attach_conditioner` takes it. Defaults to
            None, which finds it; see :func:`find_embedding`.
        conditioner (dict | TokenConditioner, optional): Arguments of
            :class:`condtok_mm.conditioning.TokenConditioner`. Defaults to None, which
            leaves the tokens as they are.
        min_matched (float): Least share of the backbone's keys that a checkpoint must
            have, in [0, 1]. Defaults to 0.9.

    Returns:
        nn.Module: The backbone.

    Raises:
        TypeError: If ``backbone`` is not the config of a stock backbone, or an argument
            of the conditioner has a wrong type or name.
        ValueError: If the backbone is not registered or has no such layer, its patch
            embedding is not obvious, or an argument of the conditioner is out of range.
    """
    if not isinstance(backbone, dict) or 'type' not in backbone:
        raise TypeError(
            "backbone must be a config, as dict(type='PyramidVisionTransformer'), but "
            f'got {shown(backbone)}.'
        )
    if embed is not None:
        check_type('embed', embed, str, 'the dotted name of a layer or None')
    model = install_checkpoint_reader(_build(backbone), min_matched)
    if conditioner is None:
        install_conditioner(model, None)
        return model
    embed = find_embedding(model) if embed is None else embed
    install_conditioner(model, conditioner, embed)
    _check_padding(model, embed)
    return model


def find_embedding(backbone: nn.Module) -> str:
    """Find the patch embedding of a backbone.

    It is the first layer, in the order of registration and from the outside in, whose
    class or name says so, as ``PatchEmbed`` or ``patch_embed`` do, and it must hold the
    first convolution of the backbone: nothing computes features before it.

    Args:
        backbone (nn.Module): Any backbone.

    Returns:
        str: Dotted name of the layer.

    Raises:
        ValueError: If there is no such layer, or it does not read the image.
    """
    names = [
        name
        for name, layer in backbone.named_modules()
        if name
        and not isinstance(layer, nn.ModuleList | nn.ModuleDict)
        and (
            EMBEDDING.search(type(layer).__name__)
            or EMBEDDING.search(name.rpartition('.')[2])
        )
    ]
    if names and reads_images(backbone, backbone.get_submodule(names[0])):
        return names[0]
    kind = type(backbone).__name__
    if names:
        raise ValueError(
            f'the patch embedding of {kind} is not obvious: {", ".join(names)} may be '
            'one, but other layers compute features before it. Set embed to the dotted '
            'name of the layer that returns the embedded tokens.'
        )
    children = ', '.join(
        f'{name} ({type(child).__name__})' for name, child in backbone.named_children()
    )
    raise ValueError(
        f'{kind} has no patch embedding: no layer is called one, or of such a class. '
        f'Its children: {children}. If one of its layers returns the embedded tokens, '
        'set embed to its dotted name.'
    )


def reads_images(backbone: nn.Module, layer: nn.Module) -> bool:
    """Whether a layer takes images and not features.

    Args:
        backbone (nn.Module): The backbone.
        layer (nn.Module): A layer of it.

    Returns:
        bool: True if the layer holds the first convolution of the backbone, in the
        order of registration; ``nn.Unfold`` counts as one.
    """
    first = next(
        (m for m in backbone.modules() if isinstance(m, nn.Conv2d | nn.Unfold)), None
    )
    return any(module is first for module in layer.modules())


def _build(cfg: dict) -> nn.Module:
    cfg = cfg.copy()
    kind = cfg['type']
    scopes = _scopes(cfg.pop('_scope_', None))
    cls, scope = _look_up(kind, scopes) if isinstance(kind, str) else (kind, scopes[0])
    if not callable(cls):
        raise TypeError(
            f'type of backbone must be a name or a class, but got {shown(kind)}.'
        )
    if 'conditioner' in inspect.signature(cls).parameters:
        raise TypeError(
            f'{cls.__name__} takes a conditioner itself; use it in place of CondTok '
            'and not inside it.'
        )
    cfg['type'] = cls
    home = cls.__module__.partition('.')[0]
    if home in MODELS.children:
        scope = home
    with MODELS.switch_scope_and_registry(scope) as registry:
        return registry.build(cfg)


def _scopes(scope: str | None) -> list[str]:
    """Where to look: the scope asked for, else that in use, then SCOPES."""
    current = DefaultScope.get_current_instance()
    if scope is None and current is not None:
        scope = current.scope_name
    return list(dict.fromkeys([scope, *SCOPES] if scope else SCOPES))


def _look_up(kind: str, scopes: list[str]) -> tuple[Callable, str]:
    """Class of a backbone, and the scope that it was found in."""
    known = set()
    for scope in scopes:
        with MODELS.switch_scope_and_registry(scope) as registry:
            try:
                cls = registry.get(kind)
            except RuntimeError:
                cls = None
            known |= registry.module_dict.keys()
        if cls is not None:
            return cls, scope
    name = kind.rpartition('.')[2]
    close = difflib.get_close_matches(name, sorted(known)) or ['none']
    raise ValueError(
        f'no backbone {kind!r} is registered in {", ".join(scopes)}; close names: '
        f'{", ".join(close)}; if it is your own, list its module in custom_imports.'
    )


def _check_padding(backbone: nn.Module, embed: str) -> None:
    if backbone.conditioner.pad_value is None:
        return
    if not reads_images(backbone, backbone.get_submodule(embed)):
        raise ValueError(
            f'{embed} of {type(backbone).__name__} takes features and not images, so '
            'padding cannot be told from image; set pad_value=None in the conditioner '
            'to count every token.'
        )
