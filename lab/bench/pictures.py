"""Pictures of the documents that are made of builds of ``fusion tune``.

    python -m lab.bench.pictures gains build/*/ -o docs/fusion-gains.svg
    python -m lab.bench.pictures pages BUILD -o docs

``gains``: what fusing a site gains, predicted and measured, over its arithmetic intensity, in FP32, BF16 and INT8.
Reads ``summary.json`` of builds, sites that were measured both ways. Intensity is that of the separate kernels: flop
per byte that they read and write. A site whose first few fused kernels are far slower than its separate ones is given
up by the tuner: its time is of kernels that were not tuned, and its gains do not count. Medians, since of a network
that was tuned for too short a time some separate kernels are as bad.

``pages``: screenshots of the page of a build, and of that of a prediction, with a headless Chromium. They are palettes
of 64 colours, so that each stays below 150 kB.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError
from costmodel.operators.layers import Conv2d
from costmodel.pages.charts import check_picture, picture
from fusion.analysis.analyzer import PRECISE_TYPES, unfused_intensity
from fusion.model.build_folder import SUMMARY
from fusion.tuning.network_tuning import HOPELESS
from lab.command_line import run

# Gains beyond these limits are drawn at the edge.
LEAST_DRAWN, MOST_DRAWN = 0.25, 4.0
# Ratio between successive ranges of intensity into which sites are grouped.
STEP = 2.0


@dataclass(frozen=True)
class SiteGain:
    """One measured site. ``intensity``: flop/B of its separate kernels; gains: separate over fused time."""

    model: str
    precision: str
    kind: str
    intensity: float
    predicted: float
    measured: float

    @property
    def given_up(self) -> bool:
        """True if the tuner gave the fused kernel up after the first trials."""
        return self.measured < 1.0 / HOPELESS


def layer_of(row: Mapping[str, Any], dtype: str) -> Conv2d:
    """Convolution of a layer in ``summary.json``, as far as needed for its flops and bytes."""
    batch, channels, height, width = row["input_shape"]
    pads = [
        max(0, (after - 1) * stride + kernel - before)
        for before, after, kernel, stride in zip(
            (height, width), row["output_shape"][2:], row["kernel"], row["stride"], strict=True
        )
    ]
    padding = (pads[0] // 2, pads[1] // 2, pads[0] - pads[0] // 2, pads[1] - pads[1] // 2)
    groups = channels if row["kind"].endswith("depthwise") else 1
    kernel, stride = tuple(row["kernel"]), tuple(row["stride"])
    return Conv2d(batch, channels, height, width, row["output_shape"][1], kernel, stride, padding, groups=groups,
                  dtype=dtype)  # fmt: skip


def site_gains(summary: Mapping[str, Any]) -> Iterator[SiteGain]:
    """Gains of every site of one build that was measured both ways; empty for networks in mixed precision."""
    precision = summary.get("precision", {}).get("shipped", "float32")
    if precision not in PRECISE_TYPES:
        return
    for site in summary["sites"]:
        predicted, measured = site["predicted"], site["measured"]
        if None in (measured["unfused_seconds"], measured["fused_seconds"]):
            continue
        if any(layer["kind"].endswith("grouped") for layer in site["layers"]):
            continue  # the number of groups is unknown
        yield SiteGain(
            summary["model"],
            precision,
            site["kind"],
            unfused_intensity([layer_of(layer, precision) for layer in site["layers"]]),
            predicted["unfused_seconds"] / predicted["fused_seconds"],
            measured["unfused_seconds"] / measured["fused_seconds"],
        )


def read_gains(builds: Sequence[Path]) -> list[SiteGain]:
    """Gains of all builds, every profile. ``InputError`` for a folder without a summary."""
    found: list[SiteGain] = []
    for build in builds:
        path = build / SUMMARY
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(
                f"{path}: cannot be read: {error.strerror}; name folders that `fusion tune` wrote"
            ) from error
        for each in summary.get("profiles", [summary]):
            found += site_gains(each)
    return found


def ranges(gains: Sequence[SiteGain]) -> dict[float, list[SiteGain]]:
    """Sites by the middle of their range of intensity, the lowest first."""
    found: dict[int, list[SiteGain]] = defaultdict(list)
    for each in gains:
        found[math.floor(math.log(each.intensity, STEP))].append(each)
    return {STEP ** (index + 0.5): found[index] for index in sorted(found)}


def draw(gains: Sequence[SiteGain], path: Path) -> None:
    """Plot with a panel for each precision: every site, and medians over ranges of intensity."""
    present = [each for each in PRECISE_TYPES if any(gain.precision == each for gain in gains)]
    with picture(path, 3.9 * len(present) + 0.3, 4.2, len(present), sharex=True, sharey=True) as panels:
        for axes, precision in zip(panels, present, strict=True):
            everything = [each for each in gains if each.precision == precision]
            sites = [each for each in everything if not each.given_up]
            middles = ranges(sites)
            for name, color in (("predicted", "tab:orange"), ("measured", "tab:blue")):
                drawn = [min(getattr(each, name), MOST_DRAWN) for each in sites]
                axes.plot([each.intensity for each in sites], drawn, "o", ms=3, alpha=0.4, color=color, mew=0,
                          rasterized=True)  # fmt: skip
                typical = [median(getattr(each, name) for each in group) for group in middles.values()]
                axes.plot(list(middles), typical, ".-", color=color, linewidth=2, label=f"{name}, median")
            left = [each for each in everything if each.given_up]
            axes.plot([each.intensity for each in left], [max(each.measured, LEAST_DRAWN) for each in left], "x", ms=3,
                      color="0.6", mew=0.7, rasterized=True, label="measured, given up")  # fmt: skip
            axes.axhline(1.0, color="black", linewidth=0.8)
            networks = len({each.model for each in everything})
            axes.set_title(f"{precision}: {len(everything)} sites of {networks} network{'s' * (networks > 1)}", size=10)
            axes.set(xscale="log", yscale="log", xlabel="flop/B of the separate kernels")
            axes.set_ylim(0.95 * LEAST_DRAWN, 1.05 * MOST_DRAWN)
            ticks = [0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0]
            axes.set_yticks(ticks, [f"{each:g}" for each in ticks], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.25)
        panels[0].set_ylabel("separate over fused time")
        panels[0].legend(fontsize=8, loc="upper left")


def table(gains: Sequence[SiteGain]) -> str:
    """Markdown table: a line for each precision and range of intensity."""
    heads = ("precision", "flop/B", "sites", "given up", "predicted", "measured", "told right", '"always fuse" right')
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for precision in PRECISE_TYPES:
        sites = [each for each in gains if each.precision == precision]
        rows = {f"{low / STEP**0.5:g} to {low * STEP**0.5:g}": group for low, group in ranges(sites).items()}
        for title, group in {**rows, **({"all": sites} if sites else {})}.items():
            tuned = [each for each in group if not each.given_up]
            gained = ["-", "-"]
            if tuned:
                gained = [f"{median(getattr(each, name) for each in tuned):.2f}" for name in ("predicted", "measured")]
            agree = Counter((each.predicted > 1) == (each.measured > 1) for each in group)[True] / len(group)
            always = sum(each.measured > 1 for each in group) / len(group)  # the baseline: fusing without a model
            left = len(group) - len(tuned)
            cells = (precision, title, len(group), left, *gained, f"{agree:.0%}", f"{always:.0%}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command("gains")
@guarded()
def gains_command(
    builds: Annotated[list[Path], typer.Argument(help="Folders that `fusion tune` wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Picture, such as docs/fusion-gains.svg.")
    ] = None,
) -> None:
    """Print, and draw, what fusing sites gained."""
    if output is not None:
        check_picture(output, "-o")
    gains = read_gains(builds)
    if not gains:
        raise InputError("no site of these builds was measured both ways: tune them for longer")
    print(table(gains))
    if output is not None:
        draw(gains, output)


BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")


@app.command("pages")
@guarded()
def pages_command(
    build: Annotated[Path, typer.Argument(help="Folder that `fusion tune` wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the pictures.")] = Path("docs"),
) -> None:
    """Write tune-report.png and predict-report.png."""
    import e2e
    from fusion.report.tune_page import write_reports

    with tempfile.TemporaryDirectory() as name:
        (tuned, *_) = write_reports(build)
        screenshot(tuned, output / "tune-report.png", 1200, 2350)
        page = Path(name) / "predict.html"
        e2e.predict("gpt2-large", gpu="h100-sxm", batch_size=4, sequence_length=1024, report=page)
        screenshot(page, output / "predict-report.png", 1200, 2300)


def screenshot(page: Path, path: Path, width: int, height: int) -> None:
    """Write a screenshot of the beginning of ``page``."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError("no headless browser here: make browser")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=4000"]
    window = [f"--window-size={width},{height}", f"--screenshot={path.resolve()}"]
    subprocess.run([browser, *options, *window, page.resolve().as_uri()], check=True, capture_output=True)
    with Image.open(path) as taken:
        small = taken.convert("RGB").quantize(64)
    small.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(run(app, "lab.bench.pictures"))
