"""How deep in a backbone each of its parameters lies."""

from mmcv.cnn import is_norm
from torch import nn

LISTS = (nn.ModuleList, nn.Sequential)
WEIGHTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def layer_depths(backbone: nn.Module) -> tuple[dict[str, int], int]:
    """Depth of every parameter of a backbone, for layer-wise learning-rate decay.

    The backbone's own ``get_layer_depth`` decides, if it has one that tells layers
    apart; otherwise the structure does, see :func:`structural_depths`.

    Args:
        backbone (nn.Module): The backbone.

    Returns:
        tuple[dict[str, int], int]: Depths by the name of the parameter, from 0 for the
        embeddings, and the number of depths; the last one is that of neck and heads.

    Raises:
        ValueError: If no block is found.
    """
    if hasattr(backbone, 'get_layer_depth'):
        prefix = 'backbone.'
        try:
            told = {
                name: backbone.get_layer_depth(prefix + name, prefix)
                for name, _ in backbone.named_parameters()
            }
        except NotImplementedError:  # mmpretrain's ResNet of a depth it does not know.
            told = {}
        # mmpretrain's HiViT looks for layers by a name that they do not have.
        if any(0 < depth < count - 1 for depth, count in told.values()):
            count = max(count for _, count in told.values())
            return {name: depth for name, (depth, _) in told.items()}, count
    return structural_depths(backbone)


def structural_depths(backbone: nn.Module) -> tuple[dict[str, int], int]:
    """Depth of every parameter of a backbone, found from its structure.

    A block is an element of a ``ModuleList`` or ``Sequential`` that holds a norm layer
    and at least two linear or convolution layers, and no smaller block. Blocks have
    depths 1 to L in the order of their registration. What comes before the first one
    has depth 0, what stands between two the depth of the former, as mmpretrain's Swin
    Transformer has it, and what comes behind the last one L + 1. An element of a list
    beside the list of stages, and as long, counts as standing before its stage
    wherever the list is registered.

    Args:
        backbone (nn.Module): The backbone.

    Returns:
        tuple[dict[str, int], int]: Depths by the name of the parameter, and their
        number L + 2.

    Raises:
        ValueError: If no block is found.
    """
    blocks = _find_blocks(backbone)
    if not blocks:
        raise ValueError(
            f'no block is found in {type(backbone).__name__}, which layer-wise '
            'learning-rate decay needs: no element of a ModuleList or Sequential holds '
            'a norm and two linear or convolution layers; give it a get_layer_depth, '
            'or use the default optimizer constructor.'
        )
    embeddings = _find_stage_embeddings(backbone, blocks)
    depths, passed = {}, 0
    for name, _ in backbone.named_parameters():
        if block := _owner(name, blocks):
            depths[name] = passed = blocks[block]
        elif embedding := _owner(name, embeddings):
            depths[name] = embeddings[embedding]
        else:
            depths[name] = passed if passed < len(blocks) else len(blocks) + 1
    return depths, len(blocks) + 2


def _find_blocks(backbone: nn.Module) -> dict[str, int]:
    """Depths from 1 on by the name of the block."""
    modules = dict(backbone.named_modules())
    names = [
        name
        for name, module in modules.items()
        if name
        and isinstance(modules[name.rpartition('.')[0]], LISTS)
        and any(is_norm(layer) for layer in module.modules())
        and _count_weights(module) >= 2
    ]
    inner = (name for name in names if not _held(name, names))
    return {name: depth for depth, name in enumerate(inner, 1)}


def _find_stage_embeddings(
    backbone: nn.Module, blocks: dict[str, int]
) -> dict[str, int]:
    """Depths of what is listed beside the stages and leads into each of them."""
    embeddings = {}
    for prefix, parent in backbone.named_modules():
        lists = {
            f'{prefix}.{name}'.lstrip('.'): child
            for name, child in parent.named_children()
            if isinstance(child, LISTS)
        }
        for name, stages in lists.items():
            held = [_held(f'{name}.{index}', blocks) for index in range(len(stages))]
            if not held or not all(held):
                continue
            for other, beside in lists.items():
                if len(beside) == len(stages) and not _held(other, blocks):
                    for index, module in enumerate(beside):
                        if _count_weights(module):
                            embeddings[f'{other}.{index}'] = blocks[held[index][0]] - 1
    return embeddings


def _count_weights(module: nn.Module) -> int:
    return sum(isinstance(layer, WEIGHTS) for layer in module.modules())


def _held(place: str, names) -> list[str]:
    """Those of the names that lie inside a place."""
    return [name for name in names if name.startswith(f'{place}.')]


def _owner(parameter: str, places: dict[str, int]) -> str | None:
    """The place that a parameter lies inside."""
    return next((place for place in places if parameter.startswith(f'{place}.')), None)
