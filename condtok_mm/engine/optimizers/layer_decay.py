"""Layer-wise learning-rate decay for the backbone of a detector."""

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn

from ...registry import register


@register('OPTIM_WRAPPER_CONSTRUCTORS')
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Multiplies each learning rate by ``decay_rate`` for every layer above it.

    All other keys of ``paramwise_cfg`` (``custom_keys``, ``norm_decay_mult``, ...)
    keep the meaning that mmengine's default constructor gives them. Depths come from
    the backbone's ``get_layer_depth``; neck and heads are above the last layer and
    keep the base learning rate.

    Args:
        optim_wrapper_cfg (dict): Config of the optimizer wrapper.
        paramwise_cfg (dict): Must hold ``decay_rate`` in (0, 1].

    Raises:
        ValueError: If ``decay_rate`` is missing or out of range, the optimizer has no
            ``lr``, or the model's backbone does not tell the depth of its layers.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        if self.base_lr is None:
            raise ValueError('layer-wise decay needs optimizer.lr, which is missing.')
        rate = self.paramwise_cfg.get('decay_rate')
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not 0 < rate <= 1:
            raise ValueError(
                f'paramwise_cfg.decay_rate must lie in (0, 1], but got {rate!r}.'
            )

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
        backbone = getattr(model, 'backbone', None)
        if not hasattr(backbone, 'get_layer_depth'):
            raise ValueError(
                f'{type(backbone).__name__} has no get_layer_depth, which layer-wise '
                'learning-rate decay needs; use a backbone that has it, or the '
                'default optimizer constructor.'
            )
        names = {id(param): name for name, param in model.named_parameters()}
        rate = self.paramwise_cfg['decay_rate']
        merged: dict[tuple, dict] = {}
        for group in groups:
            (param,) = group.pop('params')
            depth, count = backbone.get_layer_depth(names[id(param)], 'backbone.')
            scale = rate ** (count - 1 - depth)
            group['lr'] = group.get('lr', self.base_lr) * scale
            if self.base_wd is not None:
                group.setdefault('weight_decay', self.base_wd)
            group['lr_scale'] = scale
            key = tuple(sorted(group.items()))
            merged.setdefault(key, {**group, 'params': []})['params'].append(param)
        for group in merged.values():
            print_log(
                f'layer decay: lr {group["lr"]:.3g} (x {group["lr_scale"]:.3g}), '
                f'weight decay {group.get("weight_decay", "default")}, '
                f'{len(group["params"])} parameters',
                logger='current',
            )
        return list(merged.values())
