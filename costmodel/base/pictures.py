"""Pictures of results: one way of drawing for all packages. matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.whole_file import whole_file

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
_DPI = 144  # of pixels, where there are any: clouds of points inside a drawing too
# The same numbers give the same file: no date in it, names inside it that do not change.
_SETTINGS: Any = {"svg.hashsalt": "fusion-costmodel", "font.size": 9}


def can_draw() -> bool:
    """Whether the package that draws is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_picture(path: Path, option: str) -> None:
    """``InputError`` for a kind of file that is not drawn, before anything is computed. ``option``: who asks for it."""
    if path.suffix not in PICTURE_SUFFIXES:
        raise InputError(f"{path}: a plot is one of {', '.join(PICTURE_SUFFIXES)}; name such a file")
    if not can_draw():
        raise InputError(f"{option} needs the package matplotlib: pip install 'matplotlib>=3.11,<4'")


@contextmanager
def picture(path: Path, width: float, height: float, columns: int = 1, **options: Any) -> Iterator[list[Any]]:
    """The axes of a picture of ``columns`` beside each other, which is written to ``path`` once they are drawn on.

    ``width`` and ``height`` in inches; ``options``: of matplotlib's ``subplots``, such as ``sharey=True``. Raises
    ``OutputError`` where ``path`` cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, columns, squeeze=False, **options)
        yield list(axes[0])
        try:
            with whole_file(path) as stream:
                metadata = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(stream, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
