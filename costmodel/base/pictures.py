"""Plots of results, in one style for all packages. matplotlib is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.whole_file import whole_file

PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
_DPI = 144  # resolution of raster output, and of rasterised point clouds inside vector output
# Reproducible files: no date, fixed identifiers.
_SETTINGS: Any = {"svg.hashsalt": "fusion-costmodel", "font.size": 9}


def can_draw() -> bool:
    """True if matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def check_picture(path: Path, option: str) -> None:
    """Raise ``InputError`` for an unsupported file type, before anything is computed. ``option``: option that names the
    file.
    """
    if path.suffix not in PICTURE_SUFFIXES:
        raise InputError(f"{path}: a plot is one of {', '.join(PICTURE_SUFFIXES)}; name such a file")
    if not can_draw():
        raise InputError(f"{option} needs the package matplotlib: pip install 'matplotlib>=3.11,<4'")


@contextmanager
def picture(path: Path, width: float, height: float, columns: int = 1, **options: Any) -> Iterator[list[Any]]:
    """Axes of a figure with ``columns`` plots side by side, saved to ``path`` at the end of the block.

    ``width`` and ``height`` in inches; ``options``: of matplotlib's ``subplots``, such as ``sharey=True``. Raises
    ``OutputError`` if ``path`` cannot be written.
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
