"""Whole networks in FP32, BF16 and INT8: tunes them, then times each build against other engines in the same precision.

    python -m lab.bench.models                      # the networks of the table that need no file of their own
    python -m lab.bench.models resnet50 timm:densenet121 detector.onnx@x=1,3,320,320 --minutes 3
    python -m lab.bench.models --precisions float32,bfloat16,int8 --batch 1,8 --threads 1,2

A network is a name of `fusion.modelzoo`, ``timm:NAME`` (needs ``pip install --no-deps timm``) or ``published:NAME`` of
`published_networks.py`, both with random weights and batch norms with the statistics of made-up pictures, or an ONNX
file, with ``@INPUT=SHAPE`` where its shapes are open. BF16 is tuned by ``tune --precision bfloat16``, INT8 from a file
that `fusion quantize` made of the network and of made-up pictures; other engines of INT8 run the same file. Weights and
pictures are random: errors compare engines on the same numbers, they are not those of a trained network.

A second run goes on from the tuning records of the first; ``--built`` only compares what is built. The last tables have
a row for each network that has been compared in the folder, and the geometric means.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any

import numpy as np
import typer

from costmodel.base.errors import InputError, ProjectError
from fusion.comparing.compare import compare_command
from fusion.comparing.engine import TUNED, UNFUSED_ENGINE, peers_of
from fusion.comparing.output_errors import image_like
from fusion.model.build_folder import MANIFEST
from fusion.model.conv_graph import BFLOAT16, FLOAT32, INT8
from fusion.model.named_arrays import DeclaredInput, write_npz
from fusion.modelzoo import export
from fusion.relax.onnx.quantised_model import QuantizationOptions, declared_inputs, load_float_model, quantized_path
from fusion.report.console_report import ERROR_TITLES, error_cells
from fusion.tuning.quantization import quantize_model
from lab.command_line import chosen, program, run

# The networks of the table in docs/benchmarks.md except four trained ones, whose files come with other packages.
TABLE = (
    *("mobilenet_v1", "mobilenet_v2", "resnet18", "resnet50", "timm:vgg11", "timm:repvgg_a0", "timm:mixnet_s"),
    *("timm:dla34", "timm:ghostnet_100", "timm:cspdarknet53", "timm:fbnetc_100", "timm:densenet121"),
    *("timm:efficientnet_b0", "timm:mobilenetv3_large_100", "timm:semnasnet_100", "timm:efficientnet_lite0"),
    *("timm:mnasnet_100", "timm:convnext_tiny", "timm:mobilenetv4_conv_small", "timm:regnety_008"),
    *("published:shufflenet_v2", "published:yolov8n", "published:unet"),
)
# Those of the table of precisions.
SEVEN = (
    *("mobilenet_v1", "mobilenet_v2", "timm:mobilenetv3_large_100", "timm:efficientnet_b0", "timm:lcnet_100"),
    *("resnet50", "timm:convnext_tiny"),
)
PRECISIONS = (FLOAT32, BFLOAT16, INT8)
# Number of pictures for batch-norm statistics and for calibration, and the first seed of all pictures.
STATISTICS_PICTURES, CALIBRATION_PICTURES, FIRST_SEED = 24, 45, 1000


@dataclass(frozen=True)
class Setting:
    """Network for one batch size and thread count."""

    name: str
    model: Path
    shapes: Mapping[str, tuple[int, ...]]
    batch: int
    threads: int

    @property
    def title(self) -> str:
        """Name in tables and folders."""
        usual = "" if (self.batch, self.threads) == (1, 2) else f"-batch{self.batch}-threads{self.threads}"
        return f"{self.name}{usual}"


def export_with_statistics(name: str, path: Path, *, from_timm: bool) -> None:
    """Write the network ``name`` of timm or of `published_networks.py` as ONNX, for one picture of its own size.

    Batch norms use the mean and variance of :func:`picture`'s inputs, so that activations have the magnitude of those
    in a trained network: neither denormal nor infinite, and similar to those on which errors are measured.
    """
    import torch

    from e2e.capture.models.image_models import timm_library
    from lab.bench.published_networks import NETWORKS

    torch.manual_seed(0)
    if from_timm:
        timm = timm_library()
        timm.layers.set_exportable(True)
        timm.layers.set_fused_attn(False)
        network = timm.create_model(name)
        shape = tuple(network.pretrained_cfg["input_size"])
    else:
        make, shape = NETWORKS[name]
        network = make()
    norms = [each for each in network.modules() if isinstance(each, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches instead of a decaying one
    with torch.no_grad():
        network.train()
        for first in range(0, STATISTICS_PICTURES, 6):
            batch = np.concatenate([picture((1, *shape), index) for index in range(first, first + 6)])
            network(torch.from_numpy(batch.astype(np.float32)))
        network.eval()
        torch.onnx.export(
            network, (torch.randn(1, *shape),), str(path), dynamo=False, opset_version=17, input_names=["x"]
        )


def picture(shape: tuple[int, ...], index: int) -> np.ndarray:
    """Synthetic input of ``shape``, float64, a different one for each ``index`` and none of those on which errors are
    measured: in turns a picture from 0 to 1, one with mean 0 and deviation 1, and random numbers, which cover the range
    of those inputs.
    """
    seed = FIRST_SEED + index
    if index % 3 == 2:
        return np.random.default_rng(seed).standard_normal(shape)
    made = image_like(shape, seed)
    return made if index % 3 else (made - made.mean()) / made.std()


def network_file(network: str, directory: Path) -> tuple[str, Path, dict[str, tuple[int, ...]]]:
    """Short name of ``network``, its ONNX file (written into ``directory`` if needed), and the requested shapes."""
    path, _, shape = network.partition("@")
    if path.endswith(".onnx"):
        name, _, extents = shape.partition("=")
        return Path(path).stem, Path(path), {name: tuple(map(int, extents.split(",")))} if shape else {}
    kind, _, name = network.rpartition(":")
    model = directory / f"{name}.onnx"
    if not model.exists():
        directory.mkdir(parents=True, exist_ok=True)
        if kind in ("timm", "published"):
            export_with_statistics(name, model, from_timm=kind == "timm")
        else:
            export(name, model)
    return name, model, {}


def calibration_file(model: Path, inputs: Sequence[DeclaredInput], shapes: Mapping[str, Sequence[int]]) -> Path:
    """Write synthetic samples (:func:`picture`) for every input, beside ``model``."""
    path = model.with_name(f"{model.stem}-pictures.npz")
    arrays = {}
    for declared in inputs:
        extents = shapes.get(declared.name, [size or 1 for size in declared.shape])
        samples = [picture((1, *extents[1:]), index) for index in range(CALIBRATION_PICTURES * extents[0])]
        arrays[declared.name] = np.concatenate(samples).astype(declared.dtype)
    write_npz(path, arrays)
    return path


def quantised(setting: Setting) -> Path:
    """Quantised file of the network, made once."""
    target = quantized_path(setting.model)
    if not target.exists():
        inputs = declared_inputs(setting.model, load_float_model(setting.model))
        samples = calibration_file(setting.model, inputs, setting.shapes)
        made = quantize_model(setting.model, target, samples, options=QuantizationOptions(per_channel=True), say=print)
        print(f"{setting.name}: {made.quantised_layers} of {made.layers} layers quantised, errors {made.errors}")
    return target


def tune(model: Path, folder: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
    """Run `fusion tune` in a process of its own; ``InputError`` if it fails."""
    command = [sys.executable, "-m", "fusion", "tune", str(model), "-o", str(folder), *options]
    done = subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise InputError(f"{folder}: `fusion tune` ended with status {done.returncode}")


def tune_setting(setting: Setting, precision: str, model: Path, folder: Path, minutes: float, trials: int) -> None:
    """Build ``setting`` in ``folder``."""
    options = ["--minutes", f"{minutes:g}", "--trials", str(trials), "--threads", str(setting.threads)]
    for name, shape in setting.shapes.items():
        options += ["--shape", f"{name}={','.join(map(str, (setting.batch, *shape[1:])))}"]
    options += ["--batch", str(setting.batch)] if setting.batch > 1 and not setting.shapes else []
    options += ["--precision", precision] if precision == BFLOAT16 else []
    tune(model, folder, *options)


@dataclass(frozen=True)
class Effort:
    """What is built and compared. ``minutes``, ``trials``: of a build's tuning, None to compare what is built;
    ``against``: engines of FP32, those of other precisions are all there are.
    """

    precisions: Sequence[str]
    against: Sequence[str]
    minutes: float | None
    trials: int
    output: Path

    def engines(self, precision: str) -> tuple[str, ...]:
        """Engines to compare with in ``precision``, without fusion switched off."""
        named = self.against if precision == FLOAT32 else peers_of(precision)
        return tuple(name for name in named if name != UNFUSED_ENGINE)


def ours(precision: str) -> str:
    """Row name of our build; the FP32 build is the reference."""
    return TUNED if precision == FLOAT32 else f"ours, {precision}"


def builds(setting: Setting, effort: Effort) -> tuple[dict[str, Path], dict[str, str]]:
    """Folder of our build by precision, and the reasons for missing ones. ``ProjectError`` if FP32 has none."""
    found: dict[str, Path] = {}
    absent: dict[str, str] = {}
    for precision in effort.precisions:
        folder = effort.output / (setting.title if precision == FLOAT32 else f"{setting.title}-{precision}")
        try:
            model = quantised(setting) if precision == INT8 else setting.model
            if effort.minutes is not None:
                tune_setting(setting, precision, model, folder, effort.minutes, effort.trials)
            if not (folder / MANIFEST).exists():
                raise InputError(f"{folder}: not built")
            found[precision] = folder
        except ProjectError as error:
            if precision == FLOAT32:
                raise
            absent[ours(precision)] = str(error)
            print(f"{ours(precision)}: {error}", flush=True)
    return found, absent


def measure(setting: Setting, effort: Effort) -> dict[str, Any]:
    """Build and compare one setting; returns the output of ``compare --json``, with reasons for our missing rows."""
    made, absent = builds(setting, effort)
    file = quantized_path(setting.model)
    comparison = compare_command(
        made.pop(FLOAT32),
        [*(engine for precision in effort.precisions for engine in effort.engines(precision)), UNFUSED_ENGINE],
        quantized=file if INT8 in effort.precisions and file.exists() else None,
        beside={ours(precision): folder for precision, folder in made.items()},
        threads=setting.threads,
        progress=print,
    )
    return {**comparison.to_json(), "absent": absent}


def table(title: str, document: Mapping[str, Any]) -> str:
    """Markdown table, a line for each engine."""
    heads = [title, "median ms", "min ms", "times as long as ours in FP32", *ERROR_TITLES]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for row in document["rows"]:
        engine = f"{row['engine']} ({row['mode']})" if row["mode"] else row["engine"]
        times = [f"{row[key] * 1e3:.2f}" for key in ("median_seconds", "min_seconds")]
        lines.append(_line([engine, *times, _shown(row["ratio_to_tuned"]), *error_cells(row)]))
    reasons = [(each["engine"], f"{each['status']}: {each['reason']}") for each in document["not_measured"]]
    reasons += list(document["absent"].items())
    return "\n".join(lines + [_line([name, reason] + [""] * (len(heads) - 2)) for name, reason in reasons])


def overview(documents: Mapping[str, Mapping[str, Any]], precision: str, peers: Sequence[str]) -> str:
    """Markdown table, a line for each setting: ours in ``precision``, ``peers`` relative to it, largest errors.

    By medians; one column is the best of the peers by minima, which are less disturbed on a busy machine.
    """
    heads = ["network", f"ours in {precision}, ms", "in FP32, ms", "fusion off", *peers, "best of these", "by minima"]
    heads += ["error", *(f"error of {each}" for each in peers)]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    gains: dict[str, list[float]] = {each: [] for each in ("in FP32", "fusion off", *peers, "best", "by minima")}
    for name, document in documents.items():
        rows = {row["engine"]: row for row in document["rows"]}
        own = rows.get(ours(precision))
        if own is None:
            lines.append(_line([name, "-"] + [""] * (len(heads) - 2)))
            continue
        apart = UNFUSED_ENGINE if precision == FLOAT32 else f"{ours(precision)}, fusion off"
        relative = {each: row["ratio_to_tuned"] / own["ratio_to_tuned"] for each, row in rows.items()}
        minima = [rows[each]["min_seconds"] / own["min_seconds"] for each in peers if each in rows]
        found = {"in FP32": relative[TUNED], "fusion off": relative.get(apart)}
        found |= {each: relative.get(each) for each in peers}
        found["best"] = min((relative[each] for each in peers if each in relative), default=None)
        found["by minima"] = min(minima, default=None)
        for each, ratio in found.items():
            gains[each] += [] if ratio is None else [ratio]
        milliseconds = [f"{row['median_seconds'] * 1e3:.2f}" for row in (own, rows[TUNED])]
        ratios = [_shown(found[each]) for each in ("fusion off", *peers, "best", "by minima")]
        errors = [rows[each]["max_relative_error"] if each in rows else None for each in (own["engine"], *peers)]
        lines.append(
            _line([name, *milliseconds, *ratios, *("-" if each is None else f"{each:.1e}" for each in errors)])
        )
    means = [_shown(geometric_mean(each) if each else None) for each in gains.values()]
    count = len(gains["in FP32"])
    lines.append(_line([f"geometric mean of {count}", "", f"{means[0]} times", *means[1:]] + [""] * (1 + len(peers))))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None or math.isnan(ratio) else f"{ratio:.2f}"


def models_command(
    networks: Annotated[list[str] | None, typer.Argument(help="Default: those of docs/benchmarks.md.")] = None,
    precisions: Annotated[str, typer.Option(help=f"Of {', '.join(PRECISIONS)}, separated by commas.")] = FLOAT32,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    threads: Annotated[str, typer.Option(help="Thread counts, separated by commas.")] = "2",
    minutes: Annotated[float, typer.Option(help="Tuning of each network and precision.")] = 2.0,
    trials: Annotated[int, typer.Option(min=1, help="Candidates of a kernel at most.")] = 128,
    built: Annotated[bool, typer.Option("--built", help="Tune nothing, compare what is built.")] = False,
    against: Annotated[
        str, typer.Option(help="Engines of FP32, separated by commas.")
    ] = "onnxruntime,openvino,torch,torch-eager",
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of builds and figures.")] = Path(
        "build/models"
    ),
) -> None:
    """Tune networks and time them against other engines."""
    wanted = chosen(precisions.split(","), PRECISIONS)
    if FLOAT32 not in wanted:
        raise InputError(f"--precisions {precisions}: without float32, with which all are compared; add it")
    effort = Effort(wanted, against.split(","), None if built else minutes, trials, output)
    output.mkdir(parents=True, exist_ok=True)
    settings = [(int(one), int(other)) for one in batch.split(",") for other in threads.split(",")]
    for network in networks or (TABLE if len(wanted) == 1 else SEVEN):
        for setting_of in settings:
            try:
                setting = Setting(*network_file(network, output), *setting_of)
                document = measure(setting, effort)
            except ProjectError as error:  # the others are measured all the same
                print(error, flush=True)
                continue
            (output / f"{setting.title}.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
            print(table(setting.title, document), flush=True)
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(output.glob("*.json"))}
    for precision in wanted:
        print(f"\n{overview(documents, precision, effort.engines(precision))}")


if __name__ == "__main__":
    sys.exit(run(program(models_command), "lab.bench.models"))
