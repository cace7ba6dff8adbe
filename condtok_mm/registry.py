"""Register a class where every OpenMMLab scope finds it."""

from collections.abc import Callable

import mmdet.registry
import mmengine.registry
import mmpretrain.registry


def register(kind: str) -> Callable[[type], type]:
    """Make a decorator that registers a class in the root, mmdet and mmpretrain.

    Args:
        kind (str): Name of the registry, such as 'MODELS'.

    Returns:
        Callable: The decorator; it returns the class.
    """
    registries = [
        getattr(package.registry, kind) for package in (mmengine, mmdet, mmpretrain)
    ]

    def decorate(cls: type) -> type:
        for registry in registries:
            registry.register_module(module=cls)
        return cls

    return decorate
