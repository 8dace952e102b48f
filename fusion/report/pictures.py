"""Pictures of a build: the network, latency over error, the roofline of a network, gains of fusion.

In the picture of a network layers are boxes in columns that wrap, with fused blocks behind the layers of one kernel.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.machines.machine_records import Machine
from costmodel.pages.charts import LETTER, can_draw, picture, seconds_text
from costmodel.pages.document import Html, legend, tag
from fusion.analysis.analyzer import NetworkAnalysis

COLUMNS = 7
_WIDE, _HIGH, _GAP, _LANE, _BAND = 128.0, 50.0, 30.0, 12.0, 34.0
_EDGE = 22.0  # left and right margin, for connections between bands
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
    """Position of a layer: ``column`` of ``band``, ``lane`` from the top; ``left`` and ``top`` in pixels."""

    name: str
    band: int
    column: int
    lane: int
    left: float
    top: float

    @property
    def right(self) -> float:
        """x of the right edge."""
        return self.left + _WIDE

    @property
    def middle(self) -> float:
        """y of the vertical centre."""
        return self.top + _HIGH / 2


def place_layers(layers: Sequence[Mapping[str, Any]]) -> dict[str, PlacedLayer]:
    """Place every layer in the column after its last input; columns wrap into bands, branches use separate lanes."""
    depth: dict[str, int] = {}
    for layer in layers:
        depth[layer["name"]] = 1 + max((depth[name] for name in layer["reads"] if name in depth), default=-1)
    lane: dict[str, int] = {}
    taken: dict[int, set[int]] = defaultdict(set)
    for layer in layers:
        name = layer["name"]
        wanted = min((lane[source] for source in layer["reads"] if source in lane), default=0)
        free = taken[depth[name]]
        lane[name] = next(each for each in range(wanted, len(layers) + wanted + 1) if each not in free)
        free.add(lane[name])
    lanes = Counter[int]()
    for name, column in depth.items():
        lanes[column // COLUMNS] = max(lanes[column // COLUMNS], lane[name] + 1)
    tops, top = {}, _BAND
    for band in range(max(lanes, default=0) + 1):
        tops[band] = top
        top += lanes[band] * (_HIGH + _LANE) + _BAND
    return {
        name: PlacedLayer(
            name,
            column // COLUMNS,
            column % COLUMNS,
            lane[name],
            _EDGE + (column % COLUMNS) * (_WIDE + _GAP),
            tops[column // COLUMNS] + lane[name] * (_HIGH + _LANE),
        )
        for name, column in depth.items()
    }


def network_picture(network: Mapping[str, Any], short: Mapping[str, str]) -> Html:
    """``network``: see :func:`fusion.tuning.summary.network_record`; ``short``: displayed names of layers."""
    layers = network["layers"]
    placed = place_layers(layers)
    columns = min(COLUMNS, 1 + max((each.column for each in placed.values()), default=0))
    width = 2 * _EDGE + columns * (_WIDE + _GAP) - _GAP
    height = max((each.top + _HIGH for each in placed.values()), default=0.0) + _BAND
    longest = max((kernel["seconds"] or 0.0 for kernel in network["kernels"]), default=0.0)
    parts = [_block(kernel, placed, short) for kernel in network["kernels"] if len(kernel["layers"]) > 1]
    parts += [
        tag("path", d=_wire(placed[source], placed[layer["name"]], width), fill="none", stroke="#8a94a3",
            stroke_width=1.3)
        for layer in layers for source in layer["reads"] if source in placed
    ]  # fmt: skip
    parts += [_box(layer, placed[layer["name"]], network["kernels"], longest, short) for layer in layers]
    fused = sum(len(kernel["layers"]) > 1 for kernel in network["kernels"])
    title = f"{len(layers)} layers, {len(network['kernels'])} kernels, {fused} of them fused"
    shape = {"viewBox": f"0 0 {width:g} {height:g}", "width": f"{width:g}", "class_": "network", "role": "img"}
    kinds = dict.fromkeys(layer_group(layer["kind"]) for layer in layers)
    keys = {kind: COLOURS[kind] for kind in COLOURS if kind in kinds} | ({"one fused kernel": FUSED} if fused else {})
    picture = tag("div", tag("svg", tag("title", title), *parts, **shape), class_="scroll")
    return tag("div", legend(keys), picture)


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
) -> Html:
    kernel = kernels[layer["kernel"]] if layer.get("kernel") is not None else None
    colour = COLOURS[layer_group(layer["kind"])]
    told = [layer["name"], layer["kind"], layer["told"]]
    if kernel is not None and kernel["seconds"] is not None:
        how = f"in one kernel of {len(kernel['layers'])} layers that takes" if len(kernel["layers"]) > 1 else "takes"
        told.append(f"{how} {seconds_text(kernel['seconds'])}")
    first = short.get(layer["name"], layer["name"])
    second = " ".join(filter(None, (layer["kind"].removeprefix("relax."), layer["told"].split(" -> ")[0])))
    third = layer["told"].partition(" -> ")[2]
    lines = [_fitting(first, keep_end=True), _fitting(second), _fitting(third)]
    texts = [
        tag("text", line, x=at.left + 6, y=at.top + 14 + 13.5 * row, class_="on", style="font-size:11px")
        for row, line in enumerate(lines)
        if line
    ]
    bar = None
    if kernel is not None and kernel["seconds"] and longest > 0 and kernel["layers"][-1] == layer["name"]:
        bar = tag("rect", x=at.left, y=at.top + _HIGH - 4, width=_WIDE * kernel["seconds"] / longest, height=4.0,
                  fill="#fff", fill_opacity=0.75)  # fmt: skip
    shape = tag("rect", x=at.left, y=at.top, width=_WIDE, height=_HIGH, rx=5.0, fill=colour)
    return tag("g", tag("title", "\n".join(filter(None, told))), shape, bar, *texts)


def _block(kernel: Mapping[str, Any], placed: Mapping[str, PlacedLayer], short: Mapping[str, str]) -> Html:
    """Background of the layers of a fused kernel: one rectangle in each of their bands."""
    bands: dict[int, list[PlacedLayer]] = defaultdict(list)
    for name in kernel["layers"]:
        if name in placed:
            bands[placed[name].band].append(placed[name])
    told = " + ".join(short.get(name, name) for name in kernel["layers"])
    seconds = "" if kernel["seconds"] is None else f": {seconds_text(kernel['seconds'])}"
    parts = []
    for members in bands.values():
        left, top = min(each.left for each in members) - 9, min(each.top for each in members) - 9
        right = max(each.right for each in members) + 9
        bottom = max(each.top for each in members) + _HIGH + 9
        parts.append(
            tag("rect", x=left, y=top, width=right - left, height=bottom - top, rx=9.0, fill=FUSED, fill_opacity=0.55,
                stroke=FUSED, stroke_width=1.5)
        )  # fmt: skip
    return tag("g", tag("title", f"one kernel: {told}{seconds}"), *parts, class_="fused")


def _wire(source: PlacedLayer, target: PlacedLayer, width: float) -> str:
    """SVG path from the right of a layer to the left of a later one, routed over or between others."""
    x0, y0, x1, y1 = source.right, source.middle, target.left, target.middle
    if source.band == target.band and target.column == source.column + 1:
        half = (x0 + x1) / 2
        return f"M{x0:.1f} {y0:.1f}C{half:.1f} {y0:.1f} {half:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
    if source.band == target.band:
        over = min(source.top, target.top) - _LANE / 2 - 2
        return (
            f"M{x0:.1f} {y0:.1f}C{x0 + 14:.1f} {y0:.1f} {x0 + 4:.1f} {over:.1f} {x0 + 24:.1f} {over:.1f}"
            f"L{x1 - 24:.1f} {over:.1f}C{x1 - 4:.1f} {over:.1f} {x1 - 14:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        )
    # To another band: out on the right, along the gap above the target's band, in from the left.
    shift = 2.0 * (source.column % 4) + 3.0 * source.lane
    out, inside = width - _EDGE + 5 + min(shift, _EDGE - 8), _EDGE - 5 - min(shift, _EDGE - 8)
    above = target.top - target.lane * (_HIGH + _LANE) - 14 - min(shift, 12.0)
    gap = source.top - _LANE / 2 - 2 if x0 + _GAP < out - 10 else y0
    lead = f"M{x0:.1f} {y0:.1f}L{x0 + 8:.1f} {gap:.1f}L{out:.1f} {gap:.1f}"
    return f"{lead}L{out:.1f} {above:.1f}L{inside:.1f} {above:.1f}L{inside:.1f} {y1:.1f}L{x1:.1f} {y1:.1f}"


def _fitting(text: str, keep_end: bool = False) -> str:
    """Truncate ``text`` to the width of a box; ``keep_end``: at the beginning, as ends of names are more specific."""
    room = int((_WIDE - 10) / (LETTER * 11 / 12))
    if len(text) <= room:
        return text
    return "…" + text[-(room - 1) :] if keep_end else text[: room - 1] + "…"


FRONTIER = "frontier.svg"
_TIMES = ("predicted_seconds", "measured_seconds", "raced_seconds")
# Use a logarithmic scale for latencies that differ by more than this factor.
_LOG_RATIO = 6.0


def draw_frontiers(summaries: Mapping[Path, Mapping[str, Any]]) -> None:
    """Draw the frontier of each build (folder -> summary) with a precision choice; delete old pictures of others.

    Does nothing without matplotlib.
    """
    for folder, summary in summaries.items():
        path = folder / FRONTIER
        if can_draw() and summary.get("precision", {}).get("choice") is not None:
            draw_frontier(summary["precision"], path)
        else:
            path.unlink(missing_ok=True)


def draw_frontier(precision: Mapping[str, Any], path: Path) -> None:
    """Draw latency over error of the candidate networks of ``summary["precision"]``.

    It shows predicted and measured sums of kernels, whole networks timed in alternation, and the chosen one. Raises
    ``OutputError`` if the file cannot be written.
    """
    points = precision["choice"]["frontier"]
    with picture(path, 6.4, 4.2) as (axes,):
        for key, label, style in (
            (_TIMES[0], "kernels, predicted", {"marker": "o", "linestyle": ":", "mfc": "white"}),
            (_TIMES[1], "kernels, measured", {"marker": "o", "linestyle": "-"}),
            (_TIMES[2], "whole network, in turns", {"marker": "D", "linestyle": ""}),
        ):
            known = sorted((point["error"], point[key] * 1e6) for point in points if point[key] is not None)
            if known:
                axes.plot(*zip(*known, strict=True), label=label, **style)
        for point in points:
            if point["chosen"]:
                times = [
                    point[key] * 1e6 for key in ("measured_seconds", "predicted_seconds") if point[key] is not None
                ]
                axes.plot(point["error"], times[0], "*", ms=15, mfc="none", mec="black", label="chosen", zorder=3)
        times = [point[key] * 1e6 for point in points for key in _TIMES if point[key] is not None]
        if max(times) > _LOG_RATIO * min(times):
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.6 * min(times))
        else:
            axes.set_ylim(bottom=0.0, top=1.08 * axes.get_ylim()[1])
        # Annotations at three heights: points may be close.
        for index, point in enumerate(sorted(points, key=lambda each: each["error"])):
            axes.annotate(str(point["layers"]), (point["error"], 0.0), xytext=(0, 3 + 9 * (index % 3)), ha="center",
                          xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=7, color="0.35",
                          )  # fmt: skip
        if precision["max_error"] is not None:
            axes.axvline(precision["max_error"], color="tab:red", linewidth=1, linestyle="--", label="allowed error")
        axes.set(xlabel="largest error, of the largest value of an output", ylabel="latency, us")
        axes.set_title(f"of {precision['layers']} layers, at the bottom: how many are in the shorter type", size=9)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def draw_roofline(machine: Machine, threads: int, analyses: Sequence[NetworkAnalysis], path: Path) -> None:
    """Draw the roofline of ``machine`` in each precision of ``analyses``, and the predicted sites before and after
    fusion.

    Axes: flop per byte read or written by kernels, and flop/s. Raises ``OutputError`` if the file cannot be written.
    """
    low, high = 0.5, 512.0
    with picture(path, 4.2 * len(analyses) + 0.4, 4.4, len(analyses), sharey=True) as panels:
        for axes, analysis in zip(panels, analyses, strict=True):
            peak = machine.peak_flops(analysis.precision, threads) / 1e9
            for index, level in enumerate(machine.memory):
                rate = level.bandwidth.at(threads) / 1e9
                axes.plot([low, peak / rate], [rate * low, peak], color="0.6", linewidth=1)
                place = low * 1.3 ** (index + 0.5)
                if rate * place < 0.85 * peak:  # labels on the lines, at increasing distances
                    axes.text(place, rate * place, level.name, ha="center", va="center", fontsize=8, color="0.3",
                              bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
            axes.axhline(peak, color="black", linewidth=1.5)
            axes.annotate(f"{peak:.0f} GFLOP/s", (high, peak), xytext=(-3, 3), ha="right", textcoords="offset points")
            tried = [site for site in analysis.sites if not site.hopeless]
            for fuse, color, label in ((False, "0.75", "kept apart"), (True, "tab:blue", "worth fusing")):
                sites = [site for site in tried if site.fuse is fuse]
                before = [(site.unfused_intensity, site.flops / site.unfused_seconds / 1e9) for site in sites]
                after = [(site.fused_intensity, site.flops / site.fused_seconds / 1e9) for site in sites]
                gap = (np.nan, np.nan)
                lines = [each for pair in zip(before, after, strict=True) for each in (*pair, gap)]
                if sites:
                    axes.plot(*zip(*lines, strict=True), color=color, linewidth=0.7, zorder=2 + fuse)
                    axes.plot(*zip(*before, strict=True), "o", ms=4, mfc="white", mec=color, zorder=3 + fuse)
                    axes.plot(*zip(*after, strict=True), "o", ms=4, color=color, zorder=3 + fuse, label=label)
            fused = sum(site.fuse for site in tried)
            axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="flop per byte in and out of kernels")
            axes.set_title(f"{analysis.precision}: {fused} of {len(tried)} sites worth fusing", size=10)
            axes.grid(alpha=0.25)
        panels[0].set_ylabel("GFLOP/s, predicted")
        if panels[0].get_legend_handles_labels()[0]:
            panels[0].legend(title="hollow: separate, filled: fused", fontsize=8, title_fontsize=8, loc="lower right")
