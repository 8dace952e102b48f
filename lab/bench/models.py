"""Whole networks: tunes them, then times each against every engine a user could take instead, in turns.

    python -m lab.bench.models --minutes 2          # the networks of the table that need no file of their own
    python -m lab.bench.models mobilenet_v2 --minutes 15 -o build/models
    python -m lab.bench.models resnet50 timm:densenet121 detector.onnx@x=1,3,320,320 --minutes 3

A network is a name of `fusion.modelzoo`, ``timm:NAME`` (needs ``pip install --no-deps timm``) or ``published:NAME`` of
`published_networks.py`, both with random weights and batch norms with the statistics of made-up pictures, or an ONNX
file, with ``@INPUT=SHAPE`` where its shapes are open. A second run goes on from the tuning records of the first;
``--minutes 0`` only measures what is built. The last table has a row for each network that has been compared in the
folder, and the geometric means.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import ProjectError
from fusion.comparing.compare import Comparison, compare_command
from fusion.comparing.output_errors import image_like
from fusion.modelzoo import export
from fusion.report.console_report import ERROR_TITLES, error_cells
from fusion.tuning.clock import TuningDisplay
from fusion.tuning.network import InputProfile, TuneRequest
from fusion.tuning.road import tune_model

AGAINST = "onnxruntime,openvino,openvino-bf16,torch,torch-bf16,torch-eager,tvm-unfused"
OTHERS_IN_FP32 = ("onnxruntime", "openvino", "torch", "torch-eager")
UNFUSED = "tvm-unfused"
# The networks of the table in docs/benchmarks.md except four trained ones, whose files come with other packages.
TABLE = (
    *("mobilenet_v1", "mobilenet_v2", "resnet18", "resnet50", "timm:vgg11", "timm:repvgg_a0", "timm:mixnet_s"),
    *("timm:dla34", "timm:ghostnet_100", "timm:cspdarknet53", "timm:fbnetc_100", "timm:densenet121"),
    *("timm:efficientnet_b0", "timm:mobilenetv3_large_100", "timm:semnasnet_100", "timm:efficientnet_lite0"),
    *("timm:mnasnet_100", "timm:convnext_tiny", "timm:mobilenetv4_conv_small", "timm:regnety_008"),
    *("published:shufflenet_v2", "published:yolov8n", "published:unet"),
)
# Number of pictures for the batch-norm statistics of a network with random weights; the first seed of all pictures.
STATISTICS_PICTURES, FIRST_SEED = 24, 1000


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


def table(name: str, comparison: Comparison) -> str:
    """Markdown table, one line per engine."""
    lines = [
        f"| {name} | median ms | min ms | times as long as ours | {' | '.join(ERROR_TITLES)} |",
        "|---|---|---|---" + "|---" * len(ERROR_TITLES) + "|",
    ]
    for row in comparison.rows:
        engine = f"{row.engine} ({row.mode})" if row.mode else row.engine
        times = f"{row.median_seconds * 1e3:.2f} | {row.min_seconds * 1e3:.2f}"
        lines.append(f"| {engine} | {times} | {row.ratio_to_tuned:.2f} | {' | '.join(error_cells(asdict(row)))} |")
    blank = " |" * (2 + len(ERROR_TITLES))
    lines += [f"| {absent.engine} | {absent.status}: {absent.reason} |{blank}" for absent in comparison.not_measured]
    return "\n".join(lines)


def overview(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown table, one line per network: the other engines' times relative to ours, and the geometric means.

    By medians; the last column is the best of the others by minima, which are less disturbed on a busy machine.
    """
    lines = [
        "| network | ours, ms | fusion off | " + " | ".join(OTHERS_IN_FP32) + " | best of these | by minima |",
        "|---|---|---|" + "---|" * len(OTHERS_IN_FP32) + "---|---|",
    ]
    best: list[float] = []
    quietest: list[float] = []
    unfused: list[float] = []
    for name, document in documents.items():
        ratios = {row["engine"]: row["ratio_to_tuned"] for row in document["rows"]}
        tuned, tuned_minimum = next(
            (row["median_seconds"], row["min_seconds"]) for row in document["rows"] if row["engine"] == "tuned"
        )
        minima = [row["min_seconds"] / tuned_minimum for row in document["rows"] if row["engine"] in OTHERS_IN_FP32]
        others = [ratios[each] for each in OTHERS_IN_FP32 if each in ratios]
        cells = [f"{ratios[each]:.2f}" if each in ratios else "-" for each in (UNFUSED, *OTHERS_IN_FP32)]
        cells += [f"{min(each, default=math.nan):.2f}" for each in (others, minima)]
        lines.append(f"| {name} | {tuned * 1e3:.2f} | {' | '.join(cells)} |")
        best += [min(others)] if others else []
        quietest += [min(minima)] if minima else []
        unfused += [ratios[UNFUSED]] if UNFUSED in ratios else []
    blank = "| " * len(OTHERS_IN_FP32)
    means = f"{geomean(best):.2f} | {geomean(quietest):.2f}"
    lines.append(f"| geometric mean of {len(best)} | | {geomean(unfused):.2f} {blank}| {means} |")
    return "\n".join(lines)


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN for an empty sequence."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def measure(network: str, arguments: argparse.Namespace) -> None:
    """Tune and compare one network; writes its figures to disk and standard output."""
    name, model, shapes = network_file(network, arguments.output)
    build = arguments.output / name
    begun = time.monotonic()
    if arguments.minutes > 0:
        with TuningDisplay() as display:
            request = TuneRequest(
                model, build, (InputProfile(shapes),), arguments.trials, arguments.minutes, arguments.threads
            )
            tune_model(request, display)
    took = time.monotonic() - begun
    comparison = compare_command(
        build,
        arguments.against.split(","),
        quantized=arguments.quantized,
        threads=arguments.threads,
        trials_per_task=arguments.stock_trials,
        progress=print,
    )
    print(f"{name}: tuned for {took:.0f} s")
    print(table(name, comparison), flush=True)
    document = {**comparison.to_json(), "tuning_seconds": took}
    (arguments.output / f"{name}.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models",
        nargs="*",
        default=TABLE,
        help="mobilenet_v1, timm:densenet121, detector.onnx@x=1,3,320,320 ...; without one, those of the table",
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of tuning per model")
    parser.add_argument("--trials", type=int, default=128, help="per kernel at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--against", default=AGAINST, help="engines, separated by commas")
    parser.add_argument("--quantized", type=Path, help="quantised file of the one network, for engines of INT8")
    parser.add_argument("--stock-trials", type=int, default=64, help="of stock MetaSchedule per task")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    for network in arguments.models:
        try:
            measure(network, arguments)
        except ProjectError as error:  # the others are measured all the same
            print(error, flush=True)
    documents = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in arguments.output.glob("*.json")}
    print(overview({name: documents[name] for name in sorted(documents)}))


if __name__ == "__main__":
    main()
