"""Networks in FP32, BF16 and INT8, ours beside other engines in the same precision, in turns, with their errors.

    python -m lab.bench.precision mobilenet_v2 resnet50 --minutes 5 -o build/precision
    python -m lab.bench.precision --batch 1 8 --threads 1 2

Networks are named as in `lab/bench/models.py`; without names the seven of :data:`NETWORKS` are taken (those of timm
need ``pip install --no-deps timm``). Each is tuned in FP32, in BF16 (``tune --precision bfloat16``), and from a file
that `fusion quantize` made; other engines of INT8 run the same file. Weights are random, and so are the pictures that
are calibrated with: errors compare engines on the same numbers, they are not those of a trained network. A second run
goes on from the records of the first; ``--minutes 0`` builds without measuring, ``--built`` compares what is built.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fusion
from costmodel.base.errors import InputError, ProjectError
from fusion.comparing.compare import compare_command
from fusion.comparing.engine import UNFUSED_ENGINE, peers_of
from fusion.model.build_folder import MANIFEST
from fusion.model.conv_graph import BFLOAT16, FLOAT32, INT8
from fusion.model.named_arrays import DeclaredInput, write_npz
from fusion.relax.onnx.quantised_model import QuantizationOptions, declared_inputs, load_float_model, quantized_path
from fusion.report.console_report import ERROR_TITLES, error_cells
from fusion.tuning.quantization import quantize_model
from lab.bench.models import geomean, network_file, picture

NETWORKS = (
    "mobilenet_v1",
    "mobilenet_v2",
    "timm:mobilenetv3_large_100",
    "timm:efficientnet_b0",
    "timm:lcnet_100",
    "resnet50",
    "timm:convnext_tiny",
)
PRECISIONS = (FLOAT32, BFLOAT16, INT8)
# FP32 engines compared with ours: the fast ones, so that a table shows the gain of a precision.
IN_FLOAT32 = ("openvino", "onnxruntime")
# Number of inputs for calibrating a network with random weights.
PICTURES = 45


@dataclass(frozen=True)
class Setting:
    """Measured setting: a network for one batch size and thread count."""

    name: str
    model: Path
    shapes: Mapping[str, tuple[int, ...]]
    batch: int
    threads: int

    @property
    def title(self) -> str:
        """Name in tables and folders."""
        return f"{self.name}-batch{self.batch}-threads{self.threads}"


def ours(precision: str) -> str:
    """Row name of our build; the FP32 build is the reference."""
    return "tuned" if precision == FLOAT32 else f"ours, {precision}"


def calibration_file(model: Path, inputs: Sequence[DeclaredInput], shapes: Mapping[str, Sequence[int]]) -> Path:
    """Write synthetic samples (:func:`models.picture`) for every input, beside ``model``."""
    path = model.with_name(f"{model.stem}-pictures.npz")
    arrays = {}
    for declared in inputs:
        extents = shapes.get(declared.name, [size or 1 for size in declared.shape])
        samples = [picture((1, *extents[1:]), index) for index in range(PICTURES * extents[0])]
        arrays[declared.name] = np.concatenate(samples).astype(declared.dtype)
    write_npz(path, arrays)
    return path


def quantised(setting: Setting, per_channel: bool) -> Path:
    """Quantised file of the network, made once."""
    target = quantized_path(setting.model)
    if not target.exists():
        inputs = declared_inputs(setting.model, load_float_model(setting.model))
        samples = calibration_file(setting.model, inputs, setting.shapes)
        options = QuantizationOptions(per_channel=per_channel)
        made = quantize_model(setting.model, target, samples, options=options, say=print)
        print(f"{setting.name}: {made.quantised_layers} of {made.layers} layers quantised, errors {made.errors}")
    return target


def tuned(setting: Setting, precision: str, model: Path, folder: Path, minutes: float) -> Path:
    """Build in ``folder``, tuned in a separate process. ``InputError`` if this version does not support it, or it
    fails.
    """
    if precision == BFLOAT16 and "precision" not in inspect.signature(fusion.tune).parameters:
        raise InputError("this version of fusion.tune takes no precision: nothing of ours computes in bfloat16")
    words = [sys.executable, "-m", "fusion", "tune", str(model), "-o", str(folder), "--minutes", str(minutes)]
    words += ["--threads", str(setting.threads)]
    for name, shape in setting.shapes.items():
        words += ["--shape", f"{name}={','.join(map(str, (setting.batch, *shape[1:])))}"]
    words += ["--batch", str(setting.batch)] if setting.batch > 1 and not setting.shapes else []
    words += ["--precision", precision] if precision == BFLOAT16 else []
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise InputError(f"{folder}: `fusion tune` ended with status {done.returncode}")
    return folder


def builds(setting: Setting, arguments: argparse.Namespace) -> tuple[dict[str, Path], dict[str, str]]:
    """Folder of our build by precision, and the reasons for missing ones. ``ProjectError`` if FP32 has none."""
    found: dict[str, Path] = {}
    absent: dict[str, str] = {}
    for precision in arguments.precisions:
        folder = arguments.output / f"{setting.title}-{precision}"
        try:
            model = quantised(setting, not arguments.per_tensor) if precision == INT8 else setting.model
            if not arguments.built:
                tuned(setting, precision, model, folder, arguments.minutes)
            if not (folder / MANIFEST).exists():
                raise InputError(f"{folder}: not built")
            found[precision] = folder
        except ProjectError as error:
            if precision == FLOAT32:
                raise
            absent[ours(precision)] = str(error)
            print(f"{ours(precision)}: {error}", flush=True)
    return found, absent


def measure(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """Build and compare one setting; returns the output of ``compare --json``, with reasons for our missing rows."""
    made, absent = builds(setting, arguments)
    asked = [engine for precision in arguments.precisions for engine in engines(precision)]
    file = quantized_path(setting.model)
    comparison = compare_command(
        made.pop(FLOAT32),
        [*asked, UNFUSED_ENGINE],
        quantized=file if INT8 in arguments.precisions and file.exists() else None,
        beside={ours(precision): folder for precision, folder in made.items()},
        threads=setting.threads,
        progress=print,
    )
    return {**comparison.to_json(), "absent": absent}


def engines(precision: str) -> tuple[str, ...]:
    """Engines to compare with in ``precision``."""
    return IN_FLOAT32 if precision == FLOAT32 else peers_of(precision)


def table(title: str, document: Mapping[str, Any]) -> str:
    """Markdown table, a line for each engine."""
    heads = [title, "median ms", "min ms", "times as long as ours in FP32", *ERROR_TITLES]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    for row in document["rows"]:
        times = [f"{row[key] * 1e3:.2f}" for key in ("median_seconds", "min_seconds")] + [_told(row["ratio_to_tuned"])]
        lines.append(_row([f"{row['engine']} ({row['mode']})", *times, *error_cells(row)]))
    reasons = [(each["engine"], f"{each['status']}: {each['reason']}") for each in document["not_measured"]]
    reasons += list(document["absent"].items())
    return "\n".join(lines + [_row([name, reason] + [""] * (len(heads) - 2)) for name, reason in reasons])


def overview(documents: Mapping[str, Mapping[str, Any]], precision: str) -> str:
    """Markdown table, a line for each setting: ours in ``precision``, the others' times relative to it, largest
    errors.
    """
    peers = engines(precision)
    heads = ["network", f"ours in {precision}, ms", "in FP32, ms", "fusion off", *peers, "best of these"]
    heads += ["error", *(f"error of {each}" for each in peers)]
    lines = [_row(heads), "|---" * len(heads) + "|"]
    gains: dict[str, list[float]] = {each: [] for each in ("in FP32", "fusion off", *peers, "best")}
    for name, document in documents.items():
        rows = {row["engine"]: row for row in document["rows"]}
        own = rows.get(ours(precision))
        if own is None:
            lines.append(_row([name, "-"] + [""] * (len(heads) - 2)))
            continue
        apart = UNFUSED_ENGINE if precision == FLOAT32 else f"{ours(precision)}, fusion off"
        relative = {each: row["ratio_to_tuned"] / own["ratio_to_tuned"] for each, row in rows.items()}
        found = {"in FP32": relative["tuned"], "fusion off": relative.get(apart)}
        found |= {each: relative.get(each) for each in peers}
        found["best"] = min((relative[each] for each in peers if each in relative), default=None)
        for each, ratio in found.items():
            gains[each] += [] if ratio is None else [ratio]
        milliseconds = [f"{row['median_seconds'] * 1e3:.2f}" for row in (own, rows["tuned"])]
        ratios = [_told(found[each]) for each in ("fusion off", *peers, "best")]
        engines_told = (own["engine"], *peers)
        errors = [f"{rows[each]['max_relative_error']:.1e}" if each in rows else "-" for each in engines_told]
        lines.append(_row([name, *milliseconds, *ratios, *errors]))
    means = [_told(geomean(gains[each])) for each in gains]
    lines.append(_row(["geometric mean", "", f"{means[0]} times", *means[1:]] + [""] * (1 + len(peers))))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _told(ratio: float | None) -> str:
    return "-" if ratio is None or math.isnan(ratio) else f"{ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS, help="mobilenet_v1, timm:lcnet_100, file.onnx ...")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--minutes", type=float, default=5.0, help="of tuning for each network and precision")
    parser.add_argument("--built", action="store_true", help="tune nothing, compare what is built")
    parser.add_argument("--per-tensor", action="store_true", help="quantise with one scale for a weight")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/precision"))
    arguments = parser.parse_args()
    if FLOAT32 not in arguments.precisions:
        parser.error("--precisions: float32 is what all are compared with")
    arguments.output.mkdir(parents=True, exist_ok=True)
    documents: dict[str, dict[str, Any]] = {}
    for network in arguments.networks:
        for batch, threads in ((batch, threads) for batch in arguments.batch for threads in arguments.threads):
            try:
                setting = Setting(*network_file(network, arguments.output), batch, threads)
                document = measure(setting, arguments)
            except ProjectError as error:  # the others are measured all the same
                print(error, flush=True)
                continue
            documents[setting.title] = document
            path = arguments.output / f"{setting.title}.json"
            path.write_text(json.dumps(document, indent=1), encoding="utf-8")
            print(table(setting.title, document), flush=True)
    for precision in arguments.precisions:
        print(f"\n{overview(documents, precision)}")


if __name__ == "__main__":
    main()
