"""What became of the keys of a checkpoint."""

import logging
import re
from dataclasses import dataclass, field

from rich.table import Table

from ..printing import as_text

ESSENTIAL = r'^(?!.*bias$).*(patch_embed|pos_embed$|downsample\.)'
"""Keys without which a backbone does not see what it was trained on."""

SHOWN = 3
"""Names that a row of the table shows."""


@dataclass
class LoadReport:
    """How the weights of a file fit a backbone.

    Attributes:
        backbone (str): Class of the backbone.
        layout (str): Name of the layout that was recognised.
        found_under (str): Where in the file the backbone's weights are.
        matched (list[str]): Keys of the backbone that the file has, with the shape
            wanted or resized to it.
        resized (dict[str, tuple]): Those of them that were resized, to the shapes
            before and after.
        new (list[str]): Keys that such a file never holds, such as the norms that
            detection puts behind the stages.
        missing (list[str]): Keys of the backbone that the file should have and does
            not, or in a shape that cannot be resized.
        mismatched (dict[str, tuple]): The latter, to the shapes of file and backbone.
        unexpected (list[str]): Keys of the file that the backbone does not have.
        foreign (list[str]): Those of them that lie in parts that it does have.
        notes (list[str]): What else was done to the weights.
    """

    backbone: str
    layout: str
    found_under: str
    matched: list[str] = field(default_factory=list)
    resized: dict[str, tuple] = field(default_factory=dict)
    new: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: dict[str, tuple] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Matched keys as a share of those that the file should have."""
        return len(self.matched) / self.wanted if self.wanted else 1.0

    @property
    def wanted(self) -> int:
        """Number of keys that the file should have."""
        return len(self.matched) + len(self.missing)

    def check(self, min_matched: float) -> None:
        """Raise if the file does not fit.

        It does not if too few keys match, if embedding, positions or patch merging are
        missing, or if the file has more in a block than the backbone.

        Args:
            min_matched (float): Least share, in [0, 1]; 0 lets everything pass.

        Raises:
            ValueError: With the counts, the first names and what to do.
        """
        essential = [key for key in self.missing if re.search(ESSENTIAL, key)]
        if not min_matched:
            return
        if self.share < min_matched:
            what = f'min_matched={min_matched:g} is asked for'
        elif essential:
            what = f'{_first(essential)} cannot be done without'
        elif self.foreign:
            what = f'{_first(self.foreign)} have no place in it'
        else:
            return
        raise ValueError(
            f'only {len(self.matched)} of {self.wanted} keys of {self.backbone} are in '
            f'the checkpoint ({self.layout}{self._where()}), {self.share:.0%}, and '
            f'{what}. Missing: {_first(self._missing())}. Unexpected: '
            f'{_first(self.unexpected)}. {self._advice()}'
        )

    @property
    def level(self) -> int:
        """Level to log it at: a warning if something is missing."""
        return logging.WARNING if self.missing else logging.INFO

    def __str__(self) -> str:
        """The table, as text."""
        table = Table(
            title=f'weights of {self.backbone}: {self.layout}{self._where()}',
            caption='\n'.join(self.notes) or None,
            title_justify='left',
            caption_justify='left',
        )
        table.add_column('keys')
        table.add_column('count', justify='right')
        table.add_column('first names')
        rows = (
            ('matched', f'{len(self.matched)} of {self.wanted}', self.matched),
            ('resized', len(self.resized), _shapes(self.resized)),
            ('new', len(self.new), self.new),
            ('missing', len(self.missing), self._missing()),
            ('unexpected', len(self.unexpected), self.unexpected),
        )
        for name, count, names in rows:
            table.add_row(name, str(count), _first(names) if names else '')
        return as_text(table)

    def _advice(self) -> str:
        if 2 * len(self.mismatched) > len(self.missing):
            return (
                'The names fit and the shapes do not: it is a checkpoint of another '
                'size. Take one that fits, or change embed_dims, depths, num_heads or '
                'arch of model.backbone.'
            )
        if not self.matched:
            return (
                'No name fits: it is a checkpoint of another architecture, or one of a '
                'backbone alone, which belongs into model.backbone.init_cfg and not '
                'into load_from.'
            )
        return (
            'Is it a checkpoint of this architecture? To load what there is, set '
            'model.backbone.min_matched to a lower share, or to 0.'
        )

    def _where(self) -> str:
        return f', under {self.found_under}' if self.found_under else ''

    def _missing(self) -> list[str]:
        shapes = dict(zip(self.mismatched, _shapes(self.mismatched), strict=True))
        return [shapes.get(key, key) for key in self.missing]


def _shapes(keys: dict[str, tuple]) -> list[str]:
    return [
        f'{key} {"x".join(map(str, before))} -> {"x".join(map(str, after))}'
        for key, (before, after) in keys.items()
    ]


def _first(names: list[str]) -> str:
    if not names:
        return 'none'
    more = len(names) - SHOWN
    return ', '.join(names[:SHOWN]) + (f' and {more} more' if more > 0 else '')
