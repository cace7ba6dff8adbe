"""Tables as Markdown."""

from collections.abc import Sequence

from rich.table import Table


def markdown_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write rows as a Markdown table.

    Args:
        columns (Sequence[str]): Headers; line breaks in them become spaces.
        rows (Sequence[Sequence[str]]): Cells, as many in each row.

    Returns:
        str: Lines that end in a line break.
    """
    names = [name.replace('\n', ' ') for name in columns]
    lines = [names, ['---'] * len(names), *rows]
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def markdown_table(table: Table) -> str:
    """Write a table of rich as Markdown, its title above and its caption below.

    Args:
        table (Table): A table of plain cells.

    Returns:
        str: Paragraphs.
    """
    columns = [str(column.header) for column in table.columns]
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    return f'{table.title}\n\n{markdown_rows(columns, rows)}\n{table.caption}'
