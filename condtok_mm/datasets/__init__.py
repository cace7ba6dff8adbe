"""A small generated instance-segmentation set for demos and tests."""

from .shapes import CATEGORIES, Instance, draw_image, make_shapes

__all__ = ['CATEGORIES', 'Instance', 'draw_image', 'make_shapes']
