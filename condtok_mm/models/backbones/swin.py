"""mmdet's Swin Transformer with conditioned tokens."""

from mmdet.models.backbones.swin import SwinTransformer

from ...conditioning import TokenConditioner
from ...registry import register
from .install import install_conditioner


@register('MODELS')
class CondTokSwinTransformer(SwinTransformer):
    """Swin Transformer (arXiv 2103.14030) whose embedded tokens are conditioned.

    mmdet's class with a conditioner behind its patch embedding. Parameters and
    state-dict keys are the same; with ``conditioner=None`` so is every bit.

    Args:
        *args: Arguments of ``mmdet.models.SwinTransformer``.
        conditioner (dict | TokenConditioner, optional): Arguments of
            :class:`condtok_mm.conditioning.TokenConditioner`. Defaults to None, which
            leaves the tokens as they are.
        **kwargs: Keyword arguments of ``mmdet.models.SwinTransformer``.

    Raises:
        TypeError: If an argument of the conditioner has a wrong type or name.
        ValueError: If one is out of range.
    """

    def __init__(
        self, *args, conditioner: dict | TokenConditioner | None = None, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        install_conditioner(self, conditioner)

    def train(self, mode: bool = True) -> 'CondTokSwinTransformer':
        """Set training mode, frozen stages excepted.

        Args:
            mode (bool): Training (True) or evaluation. Defaults to True.

        Returns:
            CondTokSwinTransformer: The module, which mmdet's class does not return.
        """
        super().train(mode)
        return self
