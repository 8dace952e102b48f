"""Charts by matplotlib: inline SVG for pages, and picture files. matplotlib is imported only when one is drawn.

The same function draws a chart for both. In a page text stays text, and ink, grid and background follow the page, dark
or light.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.output_files import whole_file

if TYPE_CHECKING:
    from markupsafe import Markup

# Paul Tol's "bright" scheme, distinguishable with any kind of colour vision, and two of "vibrant".
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#777777")
PICTURE_SUFFIXES = (".svg", ".png", ".pdf")
_DPI = 144  # resolution of raster output, and of rasterised point clouds inside vector output
# Reproducible files: fixed identifiers. Names of layers and models are text, not formulas.
_SETTINGS: Any = {"svg.hashsalt": "fusion-costmodel", "font.size": 9, "text.parse_math": False}
_INK, _SOFT, _LINE = "#1d2530", "#5b6675", "#d5dbe3"
_VARIABLES = {_INK: "var(--ink)", _SOFT: "var(--soft)", _LINE: "var(--line)"}
_IN_PAGE: Any = {
    "svg.fonttype": "none", "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _SOFT, "xtick.color": _SOFT,
    "ytick.color": _SOFT, "grid.color": _LINE, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
_TIP = "tip: "
# What an inline SVG does not need, and what stands for it.
_SHORTER = (
    (re.compile(r"<metadata>.*?</metadata>", re.DOTALL), ""),
    (re.compile(r' xmlns(?::xlink)?="[^"]*"| version="1.1"'), ""),
    (re.compile(rf'<g id="{_TIP}([^"]*)">'), r"<g><title>\1</title>"),
    (re.compile(r'<g id="[^"]*"'), "<g"),
    (re.compile(r"'DejaVu Sans'[^;\"]*"), "system-ui, sans-serif"),
)


def check_picture(path: Path, option: str) -> None:
    """Raise ``InputError`` for an unsupported file type, before anything is computed. ``option``: option that names the
    file.
    """
    if path.suffix not in PICTURE_SUFFIXES:
        raise InputError(f"{path}: a plot is one of {', '.join(PICTURE_SUFFIXES)}; name such a file")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError(f"{option} needs the package matplotlib: pip install 'matplotlib>=3.11,<4'") from None


@contextmanager
def _figure(width: float, height: float, columns: int, settings: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS | settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the reader's fonts may have it
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(1, columns, squeeze=False, **options)[0]


@contextmanager
def picture(path: Path, width: float, height: float, columns: int = 1, **options: Any) -> Iterator[list[Any]]:
    """Axes of a figure with ``columns`` plots side by side, saved to ``path`` at the end of the block.

    ``width`` and ``height`` in inches; ``options``: of matplotlib's ``subplots``, such as ``sharey=True``. Raises
    ``OutputError`` if ``path`` cannot be written.
    """
    with _figure(width, height, columns, {}, **options) as (figure, axes):
        yield list(axes)
        try:
            with whole_file(path) as stream:
                metadata = {"Date": None} if path.suffix == ".svg" else None
                figure.savefig(stream, format=path.suffix[1:], dpi=_DPI, metadata=metadata)
        except OSError as error:
            raise OutputError(
                f"{path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error


def inline_chart(title: str, draw: Callable[[Any], object], height: float = 4.0) -> Markup:
    """SVG element with what ``draw`` adds to its axes. ``title`` describes it; ``height`` in inches, of 12 in width."""
    from markupsafe import Markup

    stream = io.StringIO()
    with _figure(12.0, height, 1, _IN_PAGE) as (figure, (axes,)):
        draw(axes)
        figure.savefig(stream, format="svg", dpi=_DPI, transparent=True, metadata={"Date": None, "Title": title})
    text = stream.getvalue().partition("<svg")[2]
    for pattern, shorter in _SHORTER:
        text = pattern.sub(shorter, text)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return Markup(f'<div class="scroll"><svg role="img"{text}</div>')


def set_logarithmic(axes: Any, names: str) -> None:
    """Make the axes in ``names`` (``x``, ``y`` or both) logarithmic, with ticks such as 200k at 1, 2 and 5."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    for name in names:
        axes.set(**{f"{name}scale": "log"})
        axis = getattr(axes, f"{name}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(EngFormatter(sep=""))
        axis.set_minor_locator(NullLocator())


def set_tip(artist: Any, text: str) -> None:
    """Show ``text`` when the pointer is over ``artist`` of an inline chart."""
    artist.set_gid(_TIP + text)


def place_labels(axes: Any, labels: Sequence[tuple[str, tuple[float, float]]]) -> list[Any]:
    """Place texts beside their points without overlapping other texts and markers; leave out those without room.

    To be called last: later changes move the points.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    drawn = [line.get_xydata() for line in axes.lines if line.get_marker() != "None"]
    points = [axes.transData.transform(point) for line in drawn for point in line]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    taken += [text.get_window_extent() for text in axes.texts]
    placed = []
    for text, point in labels:
        for away, (side, across), (level, up) in product(
            (5, 12, 22), (("left", 1), ("right", -1), ("center", 0)), (("bottom", 1), ("top", -1))
        ):
            note = axes.annotate(text, point, xytext=(away * across, away * up), textcoords="offset points", fontsize=8,
                                 ha=side, va=level)  # fmt: skip
            note.set_in_layout(False)  # the layout must not move after these measurements
            box = note.get_window_extent()
            inside = (
                axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            )
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                placed.append(note)
                break
            note.remove()
    return placed
