"""Tables of rich, as text for logs and errors."""

from rich.console import Console, RenderableType

WIDTH = 100


def as_text(renderable: RenderableType) -> str:
    """Print to a string, without colours.

    Args:
        renderable (RenderableType): Something of rich.

    Returns:
        str: Lines without spaces at their ends.
    """
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return '\n'.join(line.rstrip() for line in capture.get().splitlines())
