"""Pictures of a network: its layers and fused kernels, rooflines, and latency over error.

Charts draw into the axes of matplotlib that they are given, of a page or of a file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.units import format_quantity
from costmodel.machines.machine_records import Machine
from costmodel.pages.charts import picture, place_labels, set_logarithmic, set_tip
from fusion.analysis.analyzer import NetworkAnalysis

COLUMNS = 7
WIDE, HIGH = 128, 50  # a box, in pixels
_GAP, _LANE, _BAND = 30, 12, 34
_EDGE = 22  # left and right margin, for connections between bands
_LETTERS = 18  # in a line of a box
COLOURS = {
    "convolution": "#4477aa",
    "pointwise": "#228833",
    "depthwise": "#aa3377",
    "dense": "#997700",
    "pooling, normalisation": "#5b7f95",
    "compiled by TVM": "#8a8f98",
}
FUSED = "#f2a541"


@dataclass(frozen=True)
class PlacedLayer:
    """Position of a layer: ``column`` of ``band``, ``lane`` from the top."""

    band: int
    column: int
    lane: int
    # Corner in pixels.
    left: int
    top: int


def place_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, PlacedLayer]:
    """Place every layer in the column after its last input; columns wrap into bands, branches use separate lanes."""
    depth: dict[str, int] = {}
    lane: dict[str, int] = {}
    taken: dict[int, set[int]] = defaultdict(set)
    lanes = Counter[int]()
    for layer in layers:
        name, reads = layer["name"], [source for source in layer["reads"] if source in depth]
        depth[name] = 1 + max((depth[source] for source in reads), default=-1)
        free = min((lane[source] for source in reads), default=0)
        while free in taken[depth[name]]:
            free += 1
        lane[name] = free
        taken[depth[name]].add(free)
        band = depth[name] // COLUMNS
        lanes[band] = max(lanes[band], free + 1)
    tops, top = {}, _BAND
    for band in range(len(lanes)):
        tops[band] = top
        top += lanes[band] * (HIGH + _LANE) + _BAND
    return {
        name: PlacedLayer(
            *divmod(place, COLUMNS),
            lane[name],
            _EDGE + (place % COLUMNS) * (WIDE + _GAP),
            tops[place // COLUMNS] + lane[name] * (HIGH + _LANE),
        )
        for name, place in depth.items()
    }


def network_picture(network: Mapping[str, Any], short: Mapping[str, str]) -> dict[str, Any]:
    """Boxes, blocks of fused kernels and wires that ``tune.html`` draws.

    ``network``: see :func:`fusion.tuning.summary.network_record`; ``short``: displayed names of layers.
    """
    layers, kernels = network["layers"], network["kernels"]
    placed = place_layers(layers)
    width = 2 * _EDGE + min(COLUMNS, 1 + max(each.column for each in placed.values())) * (WIDE + _GAP) - _GAP
    longest = max((kernel["seconds"] or 0.0 for kernel in kernels), default=0.0) or 1.0
    fused = [kernel for kernel in kernels if len(kernel["layers"]) > 1]
    kinds = {layer_group(layer["kind"]) for layer in layers}
    key = {kind: colour for kind, colour in COLOURS.items() if kind in kinds}
    return {
        "width": width,
        "height": max(each.top for each in placed.values()) + HIGH + _BAND,
        "title": f"{len(layers)} layers, {len(kernels)} kernels, {len(fused)} of them fused",
        "key": key | ({"one fused kernel": FUSED} if fused else {}),
        "blocks": [_block(kernel, placed, short) for kernel in fused],
        "wires": [
            _wire(placed[source], placed[layer["name"]], width)
            for layer in layers for source in layer["reads"] if source in placed
        ],
        "boxes": [_box(layer, placed[layer["name"]], kernels, longest, short) for layer in layers],
    }  # fmt: skip


def layer_group(kind: str) -> str:
    """Colour group of a layer kind."""
    if "." in kind:
        return "compiled by TVM"
    last = kind.rpartition("-")[2]
    if last in ("pointwise", "depthwise", "dense"):
        return last
    return "pooling, normalisation" if last in ("pool", "norm") else "convolution"


def _box(
    layer: Mapping[str, Any],
    at: PlacedLayer,
    kernels: Sequence[Mapping[str, Any]],
    longest: float,
    short: Mapping[str, str],
) -> dict[str, Any]:
    kernel = kernels[layer["kernel"]] if layer.get("kernel") is not None else None
    window, _, output = layer["told"].partition(" -> ")
    name = short.get(layer["name"], layer["name"])
    tip, bar = [layer["name"], layer["kind"], layer["told"]], 0.0
    if kernel is not None and kernel["seconds"]:
        how = f"in one kernel of {len(kernel['layers'])} layers that takes" if len(kernel["layers"]) > 1 else "takes"
        tip.append(f"{how} {format_quantity(kernel['seconds'], 's', 3)}")
        bar = WIDE * kernel["seconds"] / longest if kernel["layers"][-1] == layer["name"] else 0.0
    lines = [
        # The ends of names are more specific.
        name if len(name) <= _LETTERS else "…" + name[1 - _LETTERS :],
        " ".join(filter(None, (layer["kind"].removeprefix("relax."), window)))[:_LETTERS],
        output[:_LETTERS],
    ]
    colour = COLOURS[layer_group(layer["kind"])]
    return {"at": at, "colour": colour, "lines": lines, "tip": "\n".join(filter(None, tip)), "bar": bar}


def _block(kernel: Mapping[str, Any], placed: Mapping[str, PlacedLayer], short: Mapping[str, str]) -> dict[str, Any]:
    """Background of the layers of a fused kernel: one rectangle (left, top, width, height) in each of their bands."""
    bands: dict[int, list[PlacedLayer]] = defaultdict(list)
    for name in kernel["layers"]:
        if name in placed:
            bands[placed[name].band].append(placed[name])
    tip = "one kernel: " + " + ".join(short.get(name, name) for name in kernel["layers"])
    if kernel["seconds"] is not None:
        tip += f": {format_quantity(kernel['seconds'], 's', 3)}"
    areas = []
    for members in bands.values():
        lefts, tops = [each.left for each in members], [each.top for each in members]
        size = (max(lefts) - min(lefts) + WIDE + 18, max(tops) - min(tops) + HIGH + 18)
        areas.append((min(lefts) - 9, min(tops) - 9, *size))
    return {"tip": tip, "areas": areas}


def _wire(source: PlacedLayer, target: PlacedLayer, width: int) -> str:
    """SVG path from the right of a layer to the left of a later one, routed over or between others."""
    x0, y0, x1, y1 = source.left + WIDE, source.top + HIGH // 2, target.left, target.top + HIGH // 2
    if source.band == target.band and target.column == source.column + 1:
        return f"M{x0} {y0}C{x0 + 15} {y0} {x0 + 15} {y1} {x1} {y1}"
    if source.band == target.band:
        over = min(source.top, target.top) - _LANE // 2 - 2
        return (
            f"M{x0} {y0}C{x0 + 14} {y0} {x0 + 4} {over} {x0 + 24} {over}"
            f"L{x1 - 24} {over}C{x1 - 4} {over} {x1 - 14} {y1} {x1} {y1}"
        )
    # To another band: out on the right, along the gap above the target's band, in from the left.
    shift = min(2 * (source.column % 4) + 3 * source.lane, _EDGE - 8)
    out, inside = width - _EDGE + 5 + shift, _EDGE - 5 - shift
    above = target.top - target.lane * (HIGH + _LANE) - 14 - min(shift, 12)
    gap = source.top - _LANE // 2 - 2 if x0 + _GAP < out - 10 else y0
    return f"M{x0} {y0}L{x0 + 8} {gap}L{out} {gap}L{out} {above}L{inside} {above}L{inside} {y1}L{x1} {y1}"


# Intensity in flop per byte, and flop/s.
Point = tuple[float, float]
Move = tuple[Point, Point, str]


def _ceilings(axes: Any, peaks: Mapping[str, float], bandwidths: Mapping[str, float]) -> Iterator[tuple[str, Point]]:
    """Draw the ceilings over the width of ``axes``; yield their labels with places."""
    low, high = axes.get_xlim()
    peak = max(peaks.values())
    for place, (name, rate) in enumerate(bandwidths.items()):
        axes.plot([low, peak / rate], [low * rate, peak], color="0.6", linewidth=1)
        first = max(low, axes.get_ylim()[0] / rate) * 1.3 ** (place + 0.5)
        if first * rate < 0.85 * peak:
            yield f"{name} {format_quantity(rate, 'B/s', 3)}", (first, first * rate)
    for name, rate in peaks.items():
        axes.axhline(rate, color="0.4", linewidth=1.5)
        yield f"{name} {format_quantity(rate, 'FLOP/s', 3)}", (high / 1.5, rate)


def _moves(axes: Any, moves: Iterable[Move], colour: str, label: str) -> None:
    """Draw sites before fusion (hollow) and after it (filled), with tips."""
    for before, after, tip in moves:
        axes.plot(*zip(before, after, strict=True), color=colour, linewidth=1, alpha=0.7)
        for point, fill, when in ((before, "none", "before"), (after, colour, "after")):
            (dot,) = axes.plot(*point, "o", ms=5, mfc=fill, mec=colour, label=label if fill == colour else None)
            set_tip(dot, f"{when}: {tip}")
            label = None if fill == colour else label  # type: ignore[assignment]


def draw_roofline(
    axes: Any,
    ceilings: Mapping[str, Mapping[str, float]],
    moves: Mapping[tuple[str, str], Sequence[Move]],
    singles: Sequence[tuple[Point, str]] = (),
    labels: Sequence[tuple[str, Point]] = (),
) -> None:
    """Draw ``ceilings``, sites before and after fusion by (label, colour), and kernels of layers with their tips.

    ``labels``: names of sites with their points; those for which there is no room are left out.
    """
    highest = max(ceilings["flops"].values())
    points = [point for point, _ in singles]
    points += [point for each in moves.values() for before, after, _ in each for point in (before, after)]
    intensities = [intensity for intensity, _ in points] or [1.0]
    # A rejected fused kernel may be a thousand times as slow: it is not shown.
    low = max(min([highest, *(rate for _, rate in points)]) / 1.3, highest * 1e-3)
    set_logarithmic(axes, "xy")
    axes.set(xlim=(min(intensities) / 1.5, max(intensities) * 1.5), ylim=(low, highest * 1.4),
             xlabel="flop per byte that enters or leaves the kernel", ylabel="flop/s")  # fmt: skip
    names = list(_ceilings(axes, ceilings["flops"], ceilings["bandwidths"]))
    for (intensity, rate), tip in singles:
        (dot,) = axes.plot(intensity, rate, "o", ms=4, color="0.6", alpha=0.5)
        set_tip(dot, tip)
    for (label, colour), each in moves.items():
        _moves(axes, each, colour, label)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(title="hollow: apart, filled: fused", loc="lower right")
    place_labels(axes, [*names, *labels])


def write_roofline(machine: Machine, threads: int, analyses: Sequence[NetworkAnalysis], path: Path) -> None:
    """Draw the roofline of ``machine`` with the predicted sites of ``analyses``, one plot for each precision.

    Raises ``OutputError`` if the file cannot be written.
    """
    bandwidths = {level.name: level.bandwidth.at(threads) for level in machine.memory}
    with picture(path, 4.8 * len(analyses), 4.4, len(analyses)) as panels:
        for axes, analysis in zip(panels, analyses, strict=True):
            peaks = {analysis.precision: machine.peak_flops(analysis.precision, threads)}
            moves: dict[tuple[str, str], list[Move]] = {("kept apart", "0.75"): [], ("worth fusing", "tab:blue"): []}
            for site in analysis.sites:
                if not site.hopeless:
                    before = site.unfused_intensity, site.flops / site.unfused_seconds
                    after = site.fused_intensity, site.flops / site.fused_seconds
                    kind = ("worth fusing", "tab:blue") if site.fuse else ("kept apart", "0.75")
                    moves[kind].append((before, after, site.name))
            tried, fused = sum(map(len, moves.values())), len(moves["worth fusing", "tab:blue"])
            axes.set_title(f"{analysis.precision}: {fused} of {tried} sites worth fusing, predicted", size=10)
            axes.grid(alpha=0.25)
            draw_roofline(axes, {"flops": peaks, "bandwidths": bandwidths}, moves)


# Use a logarithmic scale for latencies that differ by more than this factor.
_LOG_RATIO = 6.0


def draw_frontier(axes: Any, precision: Mapping[str, Any]) -> None:
    """Draw latency over error of the candidate networks of ``summary["precision"]``.

    It shows predicted and measured sums of kernels, whole networks timed in alternation, and the chosen one.
    """
    points = sorted(precision["choice"]["frontier"], key=lambda point: point["error"])
    times = []
    for key, label, style in (
        ("predicted_seconds", "kernels, predicted", {"marker": "o", "linestyle": ":", "mfc": "white"}),
        ("measured_seconds", "kernels, measured", {"marker": "o", "linestyle": "-"}),
        ("raced_seconds", "whole network, in turns", {"marker": "D", "linestyle": ""}),
    ):
        known = [(point["error"], point[key] * 1e6) for point in points if point[key] is not None]
        if known:
            axes.plot(*zip(*known, strict=True), label=label, **style)
            times += [time for _, time in known]
    for point in points:
        if point["chosen"]:
            time = next(point[key] for key in ("measured_seconds", "predicted_seconds") if point[key] is not None)
            axes.plot(point["error"], time * 1e6, "*", ms=15, mfc="none", mec="black", label="chosen", zorder=3)
    if max(times) > _LOG_RATIO * min(times):
        set_logarithmic(axes, "y")
        axes.set_ylim(bottom=0.6 * min(times))
    else:
        axes.set_ylim(bottom=0.0, top=1.08 * axes.get_ylim()[1])
    # Annotations at three heights: points may be close.
    for index, point in enumerate(points):
        axes.annotate(str(point["layers"]), (point["error"], 0.0), xytext=(0, 3 + 9 * (index % 3)), ha="center",
                      xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7)  # fmt: skip
    if precision["max_error"] is not None:
        axes.axvline(precision["max_error"], color="tab:red", linewidth=1, linestyle="--", label="allowed error")
    axes.set(xlabel="largest error, of the largest value of an output", ylabel="latency, us")
    axes.set_title(f"of {precision['layers']} layers, at the bottom: how many are in the shorter type", size=9)
    axes.legend()
