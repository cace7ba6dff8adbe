"""Register a class or function where every OpenMMLab scope finds it."""

from collections.abc import Callable
from typing import TypeVar

import mmdet.registry
import mmengine.registry
import mmpretrain.registry

Registered = TypeVar('Registered', bound=Callable)


def register(kind: str) -> Callable[[Registered], Registered]:
    """Make a decorator that registers what it decorates in root, mmdet and mmpretrain.

    Args:
        kind (str): Name of the registry, such as 'MODELS'.

    Returns:
        Callable: The decorator, for a class or a factory function; it returns what it
        is given.
    """
    registries = [
        getattr(package.registry, kind) for package in (mmengine, mmdet, mmpretrain)
    ]

    def decorate(module: Registered) -> Registered:
        for registry in registries:
            registry.register_module(module=module)
        return module

    return decorate
