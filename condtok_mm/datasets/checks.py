"""What is wrong with a data set or its pipeline, said before it hurts."""

from collections.abc import Iterator, Sequence

import numpy as np

from ..conditioning.padding import PAD_ATOL

MESSAGE = (
    '{where} pads images with {value} after normalisation, but the conditioner takes '
    'pad_value={expected} for padding: these pixels would count as image. Set '
    'model.backbone.conditioner.pad_value={value}, or leave the padding to '
    'data_preprocessor (pad_size_divisor).'
)


def padding_conflicts(cfg: dict, pad_value: float | Sequence[float]) -> list[str]:
    """Compare the padding of a detector's config with a conditioner's pad value.

    A ``Pad`` in a pipeline pads before normalisation, and its value is another one
    after it. Where there is none, the data preprocessor and ``BatchFixedSizePad`` pad,
    after normalisation.

    Args:
        cfg (dict): A whole config, as ``mmengine.Config`` or as a dict.
        pad_value (float | Sequence[float]): The conditioner's ``pad_value``, in the
            channel order of the model's input.

    Returns:
        list[str]: One sentence for each place that pads with another value.
    """
    preprocessor = (cfg.get('model') or {}).get('data_preprocessor') or {}
    found = {}
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        for transform in typed_nodes(cfg.get(loader)):
            if type_name(transform) == 'Pad':
                where = f'Pad in the pipeline of {loader}'
                found[where] = _normalised(_image_pad_value(transform), preprocessor)
    if not found:
        found = _padding_after_normalisation(preprocessor)
    expected = np.atleast_1d(pad_value)
    return [
        MESSAGE.format(where=where, value=_plain(value), expected=_plain(expected))
        for where, value in found.items()
        if len(expected) in (1, len(value)) or len(value) == 1
        if np.abs(np.asarray(value) - expected).max() > PAD_ATOL
    ]


def _padding_after_normalisation(preprocessor: dict) -> dict[str, list]:
    found = {}
    if preprocessor:
        found['data_preprocessor'] = [preprocessor.get('pad_value') or 0]
    for augment in preprocessor.get('batch_augments') or []:
        if type_name(augment) == 'BatchFixedSizePad':
            value = augment.get('img_pad_value', 0)
            found['BatchFixedSizePad in data_preprocessor'] = [value]
    return found


def typed_nodes(node: object) -> Iterator[dict]:
    """Every dict with a ``type`` at and below a config node.

    Args:
        node (object): A dict, a list or a plain value of a config.

    Yields:
        dict: In the order of the config, outer ones first.
    """
    if isinstance(node, dict):
        if 'type' in node:
            yield node
        node = list(node.values())
    if isinstance(node, list | tuple):
        for child in node:
            yield from typed_nodes(child)


def type_name(node: dict) -> str:
    """Name of what a config node builds, without its scope.

    Args:
        node (dict): A dict whose ``type`` is a name or a class.

    Returns:
        str: The name.
    """
    kind = node['type']
    return kind.split('.')[-1] if isinstance(kind, str) else kind.__name__


def _image_pad_value(transform: dict) -> np.ndarray:
    value = transform.get('pad_val', 0)
    return np.atleast_1d(value.get('img', 0) if isinstance(value, dict) else value)


def _normalised(value: np.ndarray, preprocessor: dict) -> np.ndarray:
    """The value of a padded pixel once the data preprocessor has normalised it."""
    if preprocessor.get('bgr_to_rgb') or preprocessor.get('rgb_to_bgr'):
        value = value[::-1]
    mean = np.asarray(preprocessor.get('mean') or 0.0, dtype=float)
    std = np.asarray(preprocessor.get('std') or 1.0, dtype=float)
    return (value - mean) / std


def _plain(value) -> float | list[float]:
    numbers = [round(float(number), 4) for number in np.unique(value)]
    if len(numbers) == 1:
        return numbers[0]
    return [round(float(number), 4) for number in value]
