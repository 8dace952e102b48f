"""Pictures of results: latency over error, the roofline of a network, gains of fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.pictures import can_draw, picture
from costmodel.machines.machine_records import Machine
from fusion.analysis.analyzer import NetworkAnalysis

FRONTIER = "frontier.svg"
_TIMES = ("predicted_seconds", "measured_seconds", "raced_seconds")
# Use a logarithmic scale for latencies that differ by more than this factor.
_WIDE = 6.0


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
        if max(times) > _WIDE * min(times):
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
