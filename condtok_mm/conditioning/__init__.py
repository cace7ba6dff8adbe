"""The method: conditioned embedded tokens, in torch alone.

After Saratchandran and Lucey, *Enhancing Transformers Through Conditioned Embedded
Tokens*, arXiv 2505.12789. The noise floor is this project's addition.
"""

from .attach import attach_conditioner, detach_conditioner
from .calibrate import calibrate_conditioner, fold_conditioner
from .conditioner import TokenConditioner
from .controls import ScaleControl
from .padding import valid_tokens
from .spectrum import condition_number

__all__ = [
    'ScaleControl',
    'TokenConditioner',
    'attach_conditioner',
    'calibrate_conditioner',
    'condition_number',
    'detach_conditioner',
    'fold_conditioner',
    'valid_tokens',
]
