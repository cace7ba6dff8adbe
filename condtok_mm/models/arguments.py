"""Checks of what a config gives to a backbone or neck, before anything is built."""

import inspect
from collections.abc import Callable
from functools import partial

from mmcv.cnn import build_activation_layer, build_norm_layer

from ..arguments import (
    check_flag,
    check_integer,
    check_number,
    check_size,
    shown,
)

WIDTH = 3072
"""Channels of the layers that are built to see that their configs work."""


def check_layer(name: str, cfg: object, build: Callable[[dict], object]) -> None:
    """Raise unless an argument is the config of a layer that can be built.

    Args:
        name (str): Name of the argument.
        cfg (object): What was given.
        build (Callable): Builds the layer from its config.

    Raises:
        TypeError: If it is not a dict with a type.
        ValueError: If it cannot be built.
    """
    if not isinstance(cfg, dict) or not isinstance(cfg.get('type'), str | type):
        raise TypeError(
            f"{name} must be the config of a layer, as dict(type='...'), but got "
            f'{shown(cfg)}.'
        )
    try:
        build(cfg)
    except Exception as error:
        reason = ' '.join(str(error).split()).partition('. ')[0].rstrip('.')
        raise ValueError(
            f'{name} must be the config of a layer that can be built, but got '
            f'{shown(cfg)}: {reason}.'
        ) from None


def check_init_cfg(name: str, value: object) -> None:
    """Raise unless an argument is the config of an initialisation.

    Args:
        name (str): Name of the argument.
        value (object): What was given.

    Raises:
        TypeError: If it is not None, a dict with a type or a list of those.
    """
    cfgs = value if isinstance(value, list | tuple) else [value]
    known = all(isinstance(cfg, dict) and 'type' in cfg for cfg in cfgs)
    if value is not None and not known:
        raise TypeError(
            f"{name} must be None, a dict(type='...') or a list of those, but got "
            f'{shown(value)}.'
        )


at_least_one = partial(check_integer, least=1)
probability = partial(check_number, interval='[0, 1)')
norm = partial(check_layer, build=lambda cfg: build_norm_layer(cfg, WIDTH))

CHECKS: dict[str, Callable[[str, object], None]] = dict(
    act_cfg=partial(check_layer, build=build_activation_layer),
    attn_drop_rate=probability,
    bn_norm_cfg=norm,
    cls_attn_layers=partial(check_integer, least=0),
    depth=at_least_one,
    drop_path_rate=probability,
    drop_rate=probability,
    embed_dims=at_least_one,
    feedforward_channels=at_least_one,
    final_norm=check_flag,
    img_size=check_size,
    in_channels=at_least_one,
    init_cfg=check_init_cfg,
    layer_scale_init_value=partial(check_number, interval='[0, inf)'),
    mlp_ratio=partial(check_number, interval='(0, inf)'),
    norm_cfg=norm,
    num_layers=at_least_one,
    out_channels=at_least_one,
    patch_norm=check_flag,
    patch_size=at_least_one,
    pretrain_img_size=check_size,
    qkv_bias=check_flag,
    tokens_norm=check_flag,
    use_abs_pos=check_flag,
    use_abs_pos_embed=check_flag,
    use_pos_embed=check_flag,
    use_rel_pos=check_flag,
    window_size=at_least_one,
    with_cp=check_flag,
)
"""The check of each argument that means the same wherever it is one."""


def check_arguments(arguments: dict[str, object], place: str = '') -> None:
    """Raise unless arguments are what their names stand for.

    Args:
        arguments (dict[str, object]): Arguments by name; those that ``CHECKS`` does
            not know are left to whoever asks.
        place (str): What the names follow in an error. Defaults to ''.

    Raises:
        TypeError: If one has a wrong type.
        ValueError: If one is out of its range.
    """
    for name, value in arguments.items():
        if name in CHECKS:
            CHECKS[name](place + name, value)


def stock_arguments(stock: type, args: tuple, kwargs: dict) -> dict[str, object]:
    """Arguments that a stock class is to be built with, checked, with its defaults.

    Args:
        stock (type): The class.
        args (tuple): Positional arguments.
        kwargs (dict): Keyword arguments.

    Returns:
        dict[str, object]: All arguments by name.

    Raises:
        TypeError: If there is an unknown argument, or one has a wrong type.
        ValueError: If one is out of its range.
    """
    signature = inspect.signature(stock)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f'{stock.__name__}: {error}; it takes {", ".join(signature.parameters)}.'
        ) from None
    bound.apply_defaults()
    check_arguments(bound.arguments)
    return bound.arguments


def check_heads(embed_dims: int, num_heads: int) -> None:
    """Raise unless channels can be shared out among the heads of an attention.

    Args:
        embed_dims (int): Channels.
        num_heads (int): Heads.

    Raises:
        ValueError: If there is a remainder.
    """
    if embed_dims % num_heads:
        raise ValueError(
            f'embed_dims={embed_dims} is not a multiple of num_heads={num_heads}.'
        )
