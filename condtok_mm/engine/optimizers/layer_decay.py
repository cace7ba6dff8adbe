"""Layer-wise learning-rate decay for any backbone."""

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from ...arguments import check_flag, check_number, check_type
from ...registry import register
from .layer_depth import layer_depths

MULTIPLIERS = (
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'flat_decay_mult',
    'dwconv_decay_mult',
    'dcn_offset_lr_mult',
)
KEYS = ('decay_rate', 'custom_keys', 'bypass_duplicate', *MULTIPLIERS)

COLUMNS = '{:>5}  {:>8}  {:>9}  {:>12}  {:>7}  {:>11}'


@register('OPTIM_WRAPPER_CONSTRUCTORS')
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Multiplies each learning rate by ``decay_rate`` for every layer above it.

    Depths come from :func:`layer_depths`, for any ``model.backbone``; neck and heads
    are above its last layer and keep the base learning rate. The other keys of
    ``paramwise_cfg`` (``norm_decay_mult``, ``bypass_duplicate``, ...) keep the meaning
    that mmengine's default constructor gives them, but for ``custom_keys``: there a key
    switches off all other rules for the parameters that it matches, here only those
    that its own ``lr_mult`` or ``decay_mult`` replaces. The groups are logged as one
    table.

    Args:
        optim_wrapper_cfg (dict): Config of the optimizer wrapper.
        paramwise_cfg (dict): Must hold ``decay_rate`` in (0, 1].

    Raises:
        TypeError: If ``paramwise_cfg`` or a value in it has a wrong type.
        ValueError: If it holds an unknown key, ``decay_rate`` is missing, a value is
            out of range, the optimizer has no ``lr``, or no ``weight_decay`` that one
            multiplies, no block is found in the model's backbone, or a parameter is
            shared without ``bypass_duplicate``.
    """

    def _validate_cfg(self) -> None:
        _check(self.paramwise_cfg, self.base_wd)
        super()._validate_cfg()
        if self.base_lr is None:
            raise ValueError('layer-wise decay needs optimizer.lr, which is missing.')
        # Kept from mmengine's constructor, which would skip its rules for a match.
        self.paramwise_cfg = dict(self.paramwise_cfg)
        self.custom_keys = self.paramwise_cfg.pop('custom_keys', {})

    def add_params(
        self, params: list[dict], module: nn.Module, prefix: str = '', **kwargs
    ) -> None:
        """Add the parameters of a module, at the root with decayed learning rates.

        Args:
            params (list[dict]): Parameter groups. They are changed in place.
            module (nn.Module): The module.
            prefix (str): Name of the module. Defaults to '', the whole model.
            **kwargs: Passed on to mmengine's constructor.
        """
        super().add_params(params, module, prefix=prefix, **kwargs)
        if not prefix:
            params[:] = self._decayed(params, module)

    def _decayed(self, groups: list[dict], model: nn.Module) -> list[dict]:
        """Scale the learning rates by depth and merge groups with equal settings."""
        if not hasattr(model, 'backbone'):
            raise ValueError(
                f'{type(model).__name__} has no backbone, which layer-wise '
                'learning-rate decay needs; use the default optimizer constructor.'
            )
        depths, count = layer_depths(model.backbone)
        names = {id(param): name for name, param in model.named_parameters()}
        merged: dict[str, dict] = {}
        for group in groups:
            (param,) = group.pop('params')
            name = names.pop(id(param), None)
            if name is None:
                raise ValueError(
                    f'a parameter of shape {tuple(param.shape)} is shared by modules; '
                    'set paramwise_cfg.bypass_duplicate=True to train it once.'
                )
            depth = count - 1
            if name.startswith('backbone.'):
                depth = depths[name.removeprefix('backbone.')]
            group.update(self._custom_settings(name))
            group['depth'] = depth
            group['lr_scale'] = self.paramwise_cfg['decay_rate'] ** (count - 1 - depth)
            group['lr'] = group.get('lr', self.base_lr) * group['lr_scale']
            if self.base_wd is not None:
                group.setdefault('weight_decay', self.base_wd)
            key = repr(sorted(group.items()))
            merged.setdefault(key, {**group, 'params': []})['params'].append(param)
        merged = sorted(merged.values(), key=lambda group: group['depth'])
        print_log(_table(merged), logger='current')
        return merged

    def _custom_settings(self, name: str) -> dict:
        """What the longest custom key that a name holds sets, as in mmengine."""
        keys = sorted(sorted(self.custom_keys), key=len, reverse=True)
        key = next((key for key in keys if key in name), None)
        if key is None:
            return {}
        settings = dict(self.custom_keys[key])
        if 'lr_mult' in settings:
            settings.setdefault('lr', self.base_lr * settings['lr_mult'])
        if 'decay_mult' in settings:
            decay = self.base_wd * settings['decay_mult']
            settings.setdefault('weight_decay', decay)
        return settings


def _check(cfg: dict, weight_decay: float | None) -> None:
    """Raise unless ``paramwise_cfg`` holds what it may."""
    check_type('paramwise_cfg', cfg, dict, 'a dict')
    if unknown := [str(key) for key in cfg if key not in KEYS]:
        raise ValueError(
            f'paramwise_cfg has no key {", ".join(unknown)}; it takes '
            f'{", ".join(KEYS)}.'
        )
    check_number('paramwise_cfg.decay_rate', cfg.get('decay_rate'), '(0, 1]')
    check_flag('paramwise_cfg.bypass_duplicate', cfg.get('bypass_duplicate', False))
    multipliers = {
        f'paramwise_cfg.{name}': cfg[name] for name in MULTIPLIERS if name in cfg
    }
    custom = cfg.get('custom_keys', {})
    check_type('paramwise_cfg.custom_keys', custom, dict, 'a dict of dicts')
    for key, settings in custom.items():
        place = f'paramwise_cfg.custom_keys[{key!r}]'
        check_type('a key of paramwise_cfg.custom_keys', key, str, 'a part of a name')
        check_type(place, settings, dict, 'a dict')
        for name in ('lr_mult', 'decay_mult'):
            if name in settings:
                multipliers[f'{place}.{name}'] = settings[name]
    for name, value in multipliers.items():
        check_number(name, value, '[0, inf)')
        if name.endswith('decay_mult') and weight_decay is None:
            raise ValueError(f'{name} needs optimizer.weight_decay, which is missing.')


def _table(groups: list[dict]) -> str:
    header = ('depth', 'lr scale', 'lr', 'weight decay', 'tensors', 'parameters')
    lines = ['layer-wise learning-rate decay:', COLUMNS.format(*header)]
    for group in groups:
        decay = group.get('weight_decay')
        lines.append(
            COLUMNS.format(
                group['depth'],
                f'{group["lr_scale"]:.3g}',
                f'{group["lr"]:.3g}',
                'default' if decay is None else f'{decay:.3g}',
                len(group['params']),
                sum(param.numel() for param in group['params']),
            )
        )
    return '\n'.join(lines)
