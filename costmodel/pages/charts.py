"""Charts: inline SVG for web pages, and pictures drawn by matplotlib.

In SVG text stays text, there are no scripts, and names are shown as tooltips. It is drawn here instead of by a chart
library, whose scripts take 0.8 to 4 MB per page: only lines, points, bars and non-overlapping labels are needed; a
page stays small and readable without scripts and on paper. matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.output_files import whole_file
from costmodel.pages.document import Html, joined, tag

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
# With fewer decades a logarithmic axis has ticks at 2 and 5 too.
_FEW_DECADES = 3
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))

Told = Callable[[float], str]


@dataclass(frozen=True)
class Axis:
    """One axis of a chart, from ``low`` to ``high``. ``ticks``: positions; ``None``: round values.

    ``told``: function that formats a tick's text. A logarithmic axis needs ``low`` above 0.
    """

    label: str
    low: float
    high: float
    logarithmic: bool = False
    ticks: Sequence[float] | None = None
    told: Told | None = None

    def place(self, value: float) -> float:
        """Relative position of ``value``: 0 at ``low``, 1 at ``high``."""
        if self.logarithmic:
            low, high = math.log(self.low), math.log(self.high)
            return (math.log(max(value, 1e-300)) - low) / ((high - low) or 1.0)
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def marks(self, count: int = 6) -> list[tuple[float, str]]:
        """Ticks within the axis and their texts; by default about ``count`` of them."""
        values = self.ticks if self.ticks is not None else self._round(count)
        told = self.told or plain_number
        return [(value, told(value)) for value in values if -1e-9 <= self.place(value) <= 1 + 1e-9]

    def _round(self, count: int) -> list[float]:
        return logarithmic_ticks(self.low, self.high) if self.logarithmic else linear_ticks(self.low, self.high, count)


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """At most about ``count`` round values from ``low`` to ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count, 1)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(each * scale for each in _STEPS if each * scale >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from ``low`` to ``high``; for few decades also 2 and 5 times these."""
    if not 0 < low < high:
        return [low]
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if math.log10(high / low) < _FEW_DECADES else (1.0,)
    return [factor * 10.0**decade for decade in decades for factor in factors if low <= factor * 10.0**decade <= high]


def around(values: Sequence[float], logarithmic: bool = False, from_zero: bool = False) -> tuple[float, float]:
    """Ends of an axis that shows all of ``values`` with some margin."""
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    if logarithmic:
        room = max((high / low) ** 0.06, 1.15)
        return low / room, high * room
    if from_zero:
        return 0.0, high * 1.06 or 1.0
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - room, high + room


def plain_number(value: float) -> str:
    """Short number with a decimal prefix: ``2.5k``."""
    size = abs(value)
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if size >= scale), (1.0, ""))
    return f"{value / scale:.4g}{prefix}"


def with_prefix(value: float, unit: str) -> str:
    """Number with a decimal prefix of its unit: ``236 GFLOP/s``."""
    size = abs(value)
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if size >= scale), (1.0, ""))
    return f"{value / scale:.3g} {prefix}{unit}"


def seconds_text(value: float, digits: int = 3) -> str:
    """Seconds in a suitable unit: ``1.23 ms``."""
    return _with_unit(value, _SECONDS, digits)


def bytes_text(value: float, digits: int = 3) -> str:
    """Bytes in a suitable unit: ``1.5 GiB``."""
    return _with_unit(value, _BYTES, digits)


def unit_of_seconds(longest: float) -> tuple[float, str]:
    """Time unit for an axis up to ``longest``: its length in seconds, and its name."""
    return next((unit for unit in _SECONDS if longest >= unit[0]), _SECONDS[-1])


def _with_unit(value: float, units: Sequence[tuple[float, str]], digits: int) -> str:
    if value == 0:
        return f"0 {next(name for scale, name in units if scale == 1.0)}"
    scale, name = next((unit for unit in units if abs(value) >= unit[0] * (1 - 1e-12)), units[-1])
    shown = value / scale
    return f"{shown:.0f} {name}" if abs(shown) >= 10**digits else f"{shown:.{digits}g} {name}"


# Paul Tol's "bright" scheme, distinguishable with any kind of colour vision, and two of "vibrant".
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#777777")
LETTER = 7.1  # upper estimate of a letter's mean width at 12 pixels
LINE = 14.0  # height of a line of text
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 62.0, 16.0, 12.0, 44.0
# Candidate positions of a label around its point: (horizontal, vertical) offsets.
_DIRECTIONS = ((1, -1), (1, 1), (-1, -1), (-1, 1), (0, -1), (0, 1), (1, 0), (-1, 0))
_DISTANCES = (6.0, 16.0, 30.0, 48.0)

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """Rectangle in pixels, for overlap checks."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """True if the two overlap."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


class Chart:
    """Chart of ``width`` x ``height`` pixels (which scale with the page) over two axes.

    Later drawings lie on top. Labels are placed last, by :meth:`svg`.
    """

    def __init__(self, x: Axis, y: Axis, width: float = 760.0, height: float = 340.0) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height
        self._drawn: list[Html] = []
        self._taken: list[Box] = []
        self._wanted: list[tuple[Point, str, str | None]] = []

    def at(self, x: float, y: float) -> Point:
        """Pixel position of a point."""
        across = self.width - _MARGIN_LEFT - _MARGIN_RIGHT
        up = self.height - _MARGIN_TOP - _MARGIN_BOTTOM
        return _MARGIN_LEFT + across * self.x.place(x), _MARGIN_TOP + up * (1 - self.y.place(y))

    def line(
        self, points: Sequence[Point], colour: str, *, width: float = 2.0, dashed: bool = False, steps: bool = False
    ) -> None:
        """Draw a line through ``points``; ``steps``: each value holds until the next."""
        self._drawn.append(
            tag(
                "path",
                d=_path(self._stepped(points) if steps else [self.at(*point) for point in points]),
                fill="none",
                stroke=colour,
                stroke_width=width,
                stroke_linejoin="round",
                stroke_dasharray="6 4" if dashed else None,
            )
        )

    def area(
        self, upper: Sequence[Point], lower: Sequence[Point], colour: str, title: str, steps: bool = False
    ) -> None:
        """Fill the area between two lines over the same positions."""
        above, below = (
            self._stepped(line) if steps else [self.at(*point) for point in line] for line in (upper, lower)
        )
        self._drawn.append(
            tag("path", tag("title", title), d=_path([*above, *reversed(below)]) + "Z", fill=colour, fill_opacity=0.85)
        )

    def points(
        self, points: Iterable[tuple[float, float, str]], colour: str, radius: float = 4.0, faint: bool = False
    ) -> None:
        """Draw dots: (x, y, tooltip)."""
        for x, y, title in points:
            across, down = self.at(x, y)
            self._drawn.append(
                tag("circle", tag("title", title), cx=across, cy=down, r=radius, fill=colour,
                    fill_opacity=0.35 if faint else None)
            )  # fmt: skip
            if not faint:
                self._taken.append(Box(across - radius, down - radius, across + radius, down + radius))

    def rings(self, points: Iterable[tuple[float, float, str]], colour: str, radius: float = 4.0) -> None:
        """Draw hollow dots."""
        for x, y, title in points:
            across, down = self.at(x, y)
            self._drawn.append(
                tag("circle", tag("title", title), cx=across, cy=down, r=radius, fill="none", stroke=colour,
                    stroke_width=1.6, pointer_events="all")
            )  # fmt: skip
            self._taken.append(Box(across - radius, down - radius, across + radius, down + radius))

    def bar(self, left: Point, right: Point, colour: str, title: str) -> None:
        """Draw a filled rectangle between two corners."""
        (x0, y0), (x1, y1) = self.at(*left), self.at(*right)
        self._drawn.append(
            tag("rect", tag("title", title), x=min(x0, x1), y=min(y0, y1), width=max(abs(x1 - x0), 0.75),
                height=max(abs(y1 - y0), 0.75), fill=colour)
        )  # fmt: skip

    def label(self, x: float, y: float, text: str, colour: str | None = None) -> None:
        """Add text beside a point, without overlapping other text or points; omitted if there is no room."""
        self._wanted.append((self.at(x, y), text, colour))

    def note(self, x: float, y: float, text: str, colour: str | None = None, anchor: str = "start") -> None:
        """Add text that starts (or ends) exactly at a point, such as the name of a line."""
        across, down = self.at(x, y)
        long = LETTER * len(text)
        left = across if anchor == "start" else across - long
        self._taken.append(Box(left, down - LINE, left + long, down + 2))
        self._drawn.append(
            tag("text", text, x=across, y=down - 4, text_anchor=anchor, class_="halo", style=_fill(colour))
        )

    def svg(self, title: str) -> Html:
        """The chart as an element; ``title`` describes its content."""
        shape = {"viewBox": f"0 0 {self.width:g} {self.height:g}", "class_": "wide", "role": "img"}
        inside = tag("svg", tag("title", title), self._grid(), *self._drawn, self._labels(), **shape)
        return tag("div", inside, class_="scroll")

    def placed(self) -> list[tuple[str, Box, Point]]:
        """Text, box and point of every label for which there is room."""
        return [(text, box, point) for point, text, _, box in self._roomy()]

    def _roomy(self) -> Iterator[tuple[Point, str, str | None, Box]]:
        taken = list(self._taken)
        for point, text, colour in self._wanted:
            box = self._free(point, text, taken)
            if box is not None:
                taken.append(box)
                yield point, text, colour, box

    def _free(self, point: Point, text: str, taken: Sequence[Box]) -> Box | None:
        long = LETTER * len(text)
        for distance in _DISTANCES:
            for across, down in _DIRECTIONS:
                left = point[0] + across * distance - (0 if across > 0 else long if across < 0 else long / 2)
                middle = point[1] + down * (distance + (LINE / 2 if across == 0 else 0))
                box = Box(left, middle - LINE / 2, left + long, middle + LINE / 2)
                inside = box.left >= _MARGIN_LEFT and box.right <= self.width and box.top >= 0
                if inside and box.bottom <= self.height - _MARGIN_BOTTOM and not any(map(box.meets, taken)):
                    return box
        return None

    def _labels(self) -> Html:
        parts = []
        for point, text, colour, box in self._roomy():
            near = min(max(point[0], box.left), box.right), min(max(point[1], box.top), box.bottom)
            if abs(near[0] - point[0]) + abs(near[1] - point[1]) > 12.0:
                parts.append(tag("path", d=_path([point, near]), class_="grid", fill="none"))
            parts.append(tag("text", text, x=box.left, y=box.bottom - 3.0, class_="halo", style=_fill(colour)))
        return joined(parts)

    def _stepped(self, points: Sequence[Point]) -> list[Point]:
        corners: list[Point] = []
        for x, y in points:
            if corners:
                corners.append((self.at(x, y)[0], corners[-1][1]))
            corners.append(self.at(x, y))
        return corners

    def _grid(self) -> Html:
        bottom, left = self.height - _MARGIN_BOTTOM, _MARGIN_LEFT
        parts = []
        end = -1e9
        for value, text in self.x.marks(8):
            across = self.at(value, self.y.low)[0]
            parts.append(tag("path", d=_path([(across, _MARGIN_TOP), (across, bottom)]), class_="grid"))
            half = LETTER * len(text) / 2
            if across - half > end + 6:  # a tick without room for its text has none
                parts.append(tag("text", text, x=across, y=bottom + 16, text_anchor="middle", class_="soft"))
                end = across + half
        end = 1e9
        for value, text in self.y.marks(6):
            down = self.at(self.x.low, value)[1]
            parts.append(tag("path", d=_path([(left, down), (self.width - _MARGIN_RIGHT, down)]), class_="grid"))
            if down < end - LINE + 2:
                parts.append(tag("text", text, x=left - 6, y=down + 4, text_anchor="end", class_="soft"))
                end = down
        corner = [(left, _MARGIN_TOP), (left, bottom), (self.width - _MARGIN_RIGHT, bottom)]
        parts.append(tag("path", d=_path(corner), class_="axis"))
        middle = (left + self.width - _MARGIN_RIGHT) / 2
        parts.append(tag("text", self.x.label, x=middle, y=self.height - 8, text_anchor="middle"))
        turned = f"translate(13 {(bottom + _MARGIN_TOP) / 2:.1f}) rotate(-90)"
        parts.append(tag("text", self.y.label, transform=turned, text_anchor="middle"))
        return joined(parts)


def stacked_bar(parts: Mapping[str, float], colours: Mapping[str, str], told: Mapping[str, str], title: str) -> Html:
    """One wide bar of parts, with their names inside if there is room. ``told``: description of each part."""
    width, height = 760.0, 34.0
    whole = sum(parts.values()) or 1.0
    pieces, left = [], 0.0
    for name, value in parts.items():
        long = width * value / whole
        if long <= 0:
            continue
        pieces.append(
            tag("rect", tag("title", f"{name}: {told[name]}"), x=left, y=0.0, width=long, height=height,
                fill=colours[name])
        )  # fmt: skip
        text = next((each for each in (f"{name} {told[name]}", name) if LETTER * len(each) < long - 8), None)
        if text is not None:
            pieces.append(tag("text", text, x=left + long / 2, y=22.0, text_anchor="middle", class_="on"))
        left += long
    shape = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img"}
    return tag("div", tag("svg", tag("title", title), *pieces, **shape), class_="scroll")


def stacked_rows(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    axis: Axis,
    told: Mapping[str, str] | None = None,
    row_height: float = 20.0,
) -> Html:
    """A bar of parts for each row, over one axis. ``told``: additional text of each row."""
    left = min(max((LETTER * len(name) for name, _ in rows), default=0.0) + 12.0, 300.0)
    width, bottom = 760.0, row_height * len(rows) + 4.0
    across = width - left - max((LETTER * len(text) for text in (told or {}).values()), default=0.0) - 24.0

    def place(value: float) -> float:
        return left + across * axis.place(value)

    parts = []
    for value, text in axis.marks(6):
        parts.append(tag("path", d=_path([(place(value), 0.0), (place(value), bottom)]), class_="grid"))
        parts.append(tag("text", text, x=place(value), y=bottom + 14, text_anchor="middle", class_="soft"))
    for index, (name, values) in enumerate(rows):
        top, at = row_height * index + 2.0, axis.low
        room = int((left - 8) / LETTER)
        shown = name if len(name) <= room else "…" + name[-(room - 1) :]
        parts.append(tag("text", tag("title", name), shown, x=left - 6, y=top + row_height - 7, text_anchor="end"))
        for part, value in values.items():
            if value <= 0:
                continue
            title = f"{name}: {part} {(axis.told or str)(value)}"
            parts.append(
                tag("rect", tag("title", title), x=place(at), y=top, width=max(place(at + value) - place(at), 0.5),
                    height=row_height - 4, fill=colours[part])
            )  # fmt: skip
            at += value
        if told is not None:
            parts.append(tag("text", told[name], x=place(at) + 4, y=top + row_height - 7, class_="soft"))
    parts.append(tag("text", axis.label, x=left + across / 2, y=bottom + 32, text_anchor="middle"))
    shape = {"viewBox": f"0 0 {width:g} {bottom + 40:g}", "class_": "wide", "role": "img"}
    return tag("div", tag("svg", *parts, **shape), class_="scroll")


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _fill(colour: str | None) -> str | None:
    return None if colour is None else f"fill:{colour}"


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
