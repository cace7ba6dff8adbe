"""What a check found: one row for each kind, with its count and the first names."""

from collections import Counter
from dataclasses import dataclass

from rich.table import Table

from ..printing import as_text

SHOWN = 3
"""Names that a row shows."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        what (str): What is there, in the plural.
        remedy (str): What it leads to and what to do, in sentences.
        error (bool): Whether training would fail or learn something wrong.
    """

    what: str
    remedy: str
    error: bool = True


class Findings:
    """Faults by their kind."""

    def __init__(self) -> None:
        self.counts = Counter()
        self.names = {}

    def add(self, kind: Kind, name: str) -> None:
        """Note a fault.

        Args:
            kind (Kind): Its kind.
            name (str): Where it is.
        """
        self.counts[kind] += 1
        names = self.names.setdefault(kind, [])
        if len(names) < SHOWN:
            names.append(name)

    def move(self, kind: Kind, other: Kind) -> None:
        """Call all faults of a kind by another one.

        Args:
            kind (Kind): The kind so far.
            other (Kind): The kind from now on.
        """
        self.counts[other] = self.counts.pop(kind)
        self.names[other] = self.names.pop(kind)

    def errors(self) -> list[Kind]:
        """Kinds of errors found.

        Returns:
            list[Kind]: In the order in which they were found.
        """
        return [kind for kind in self.counts if kind.error]

    def warnings(self) -> list[Kind]:
        """Kinds of warnings found.

        Returns:
            list[Kind]: In the order in which they were found.
        """
        return [kind for kind in self.counts if not kind.error]

    def table(self) -> str:
        """Lay the findings out.

        Returns:
            str: A table, errors first.
        """
        table = Table(show_lines=True)
        table.add_column('')
        table.add_column('count', justify='right')
        table.add_column('what, and what to do', ratio=3)
        table.add_column('first', ratio=2, overflow='fold')
        for kind in self.errors() + self.warnings():
            names = self.names[kind]
            more = self.counts[kind] - len(names)
            table.add_row(
                'ERROR' if kind.error else 'warning',
                str(self.counts[kind]),
                f'{kind.what}. {kind.remedy}',
                '\n'.join(names) + (f'\nand {more} more' if more else ''),
            )
        return as_text(table)
