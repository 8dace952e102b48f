"""Fused depthwise -> 1x1 kernels against separately tuned ones, over the shapes of the published benchmark.

Both arms have the same templates, tuner and trials per kernel; at the end they take turns in one process
(A B A B), and that ratio is reported. A run goes on from the records of the one before.

The rate of the vector units is measured beside every shape, as ``costmodel calibrate`` does it: on a shared machine it
changes by a fifth within an hour, and what a kernel reaches of it says nothing unless both are of one minute.

    python -m lab.bench.kernels --trials 64 -o build/kernels
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean

from costmodel.cpu.calibration import Microbenchmarks, compile_microbenchmarks
from costmodel.cpu.learned_residual import ResidualModel
from costmodel.cpu.roofline import RooflineModel
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs
from fusion.analysis.target_machine import machine_for
from lab.data.data_folder import data_folder
from schedules.contract.cpu_target import CpuTarget, host_target
from schedules.records.tuning_records import RecordStore

ROUNDS = 5
WORKLOADS = data_folder() / "fusion_workloads.csv"


@dataclass(frozen=True)
class Row:
    """Seconds of both arms, measured within the same minute."""

    name: str
    shape: str
    fused_seconds: float
    separate_seconds: float
    ratio: float
    gflops: float
    # Fused flops per second over `rate_gflops`.
    peak_share: float
    # Rate of multiply-adds in that minute.
    rate_gflops: float


def workloads(path: Path) -> Iterator[tuple[str, FusedConvs]]:
    """Yield distinct depthwise -> 1x1 pairs, SAME padding, bias; the activations of MobileNetV1, V2 and MNASNet."""
    seen: set[FusedConvs] = set()
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["first"] != "depthwise_conv2d":
                continue
            fused = _pair(row)
            if fused not in seen:
                seen.add(fused)
                yield row["name"], fused


def _pair(row: dict[str, str]) -> FusedConvs:
    number = {key: int(row[key]) for key in row if key not in ("name", "first", "second")}
    kernel, stride = number["first_kernel"], number["first_stride"]
    pads = [_same(size, kernel, stride) for size in (number["height"], number["width"])]
    channels = number["in_channels"]
    depthwise = Conv2d(
        number["batch"], channels, number["height"], number["width"], channels, (kernel, kernel), (stride, stride),
        (pads[0][0], pads[1][0], pads[0][1], pads[1][1]), groups=channels, epilogue=Epilogue(True, "relu6"),
    )  # fmt: skip
    # MobileNetV1 has an activation after its 1x1 convolution, the projections of V2 and MNASNet are linear.
    last = Epilogue(True, "relu6" if row["name"].startswith("mv1") else None)
    shape = (number["batch"], channels, depthwise.out_height, depthwise.out_width)
    return FusedConvs((depthwise, Conv2d(*shape, number["second_out_channels"], (1, 1), epilogue=last)))


def _same(size: int, kernel: int, stride: int) -> tuple[int, int]:
    total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
    return total // 2, total - total // 2


def measure(pairs: list[tuple[str, FusedConvs]], cpu: CpuTarget, directory: Path, trials: int) -> list[Row]:
    """Tune every kernel with the same effort, then time fused against separate kernels in turns."""
    from schedules.kernels.template_table import config_terms
    from schedules.measuring.measure_runner import Runner
    from schedules.tuning.kernel_tuner import Tuner, TuningProgress, TuningTask

    machine = machine_for(None, cpu.threads, print)
    roofline = RooflineModel(machine, cpu.threads)
    cost_model = ResidualModel(roofline, config_terms=partial(config_terms, cpu=cpu))
    operators = {operator for _, fused in pairs for operator in (fused, *fused.convs)}

    def progress(state: TuningProgress) -> None:
        if state.trial % 100 == 0 and state.stage == "search":
            print(f"  trial {state.trial} of {state.trials}, {state.eta_seconds / 60:.0f} min left", flush=True)

    rows = []
    directory.mkdir(parents=True, exist_ok=True)
    benchmarks = compile_microbenchmarks(directory)
    with RecordStore(directory, cpu) as store, Runner(cpu) as runner:
        tuner = Tuner(store, cpu, cost_model, runner, progress)
        tuner.tune([TuningTask(operator, trials) for operator in sorted(operators, key=repr)])
        for name, fused in pairs:
            records = {operator: store.best(operator) for operator in (fused, *fused.convs)}
            arms = [[fused], list(fused.convs)]
            candidates = [[(op, records[op].config) for op in arm] for arm in arms]
            # Another process may occupy a core for longer than one comparison lasts: use the least of several runs.
            rates, rounds = [_fma_rate(benchmarks, cpu.threads)], []
            for _ in range(ROUNDS):
                rounds.append([outcome.seconds for outcome in runner.compare(candidates)])
                rates.append(_fma_rate(benchmarks, cpu.threads))
            row = _row(name, fused, *(min(times) for times in zip(*rounds, strict=True)), max(rates))
            rows.append(row)
            print(format_row(row), flush=True)
    return rows


def _fma_rate(benchmarks: Microbenchmarks, threads: int) -> float:
    """FP32 operations per second of all threads, the best of 30 samples of 3 ms."""
    sample = benchmarks.rate("fma_float32", threads, 30)
    if sample is None:
        raise SystemExit("the rate of FP32 multiply-adds cannot be measured here")
    return sample.best


def _row(name: str, fused: FusedConvs, fused_seconds: float, separate_seconds: float, peak: float) -> Row:
    _, channels, height, width = fused.input_shape
    stride = fused.convs[0].stride[0]
    shape = f"{height}x{width}x{channels} /{stride} -> {fused.output_shape[1]}"
    rate = fused.flops / fused_seconds
    ratio = separate_seconds / fused_seconds
    return Row(name, shape, fused_seconds, separate_seconds, ratio, rate / 1e9, rate / peak, peak / 1e9)


HEADER = (
    "| shape | layers | fused us | separate us | separate / fused | GFLOP/s | of FP32 rate |\n"
    "|---|---|---|---|---|---|---|"
)


def format_row(row: Row) -> str:
    return (
        f"| {row.name} | {row.shape} | {row.fused_seconds * 1e6:.1f} | {row.separate_seconds * 1e6:.1f} "
        f"| {row.ratio:.2f} | {row.gflops:.0f} | {row.peak_share:.0%} |"
    )


def summary(rows: list[Row]) -> dict[str, float]:
    """Geometric means over all shapes and over those that selection fuses (ratio above 1), and MobileNetV1's rate."""
    selected = [row.ratio for row in rows if row.ratio > 1.0]
    first = [row.peak_share for row in rows if row.name.startswith("mv1")]
    return {
        "shapes": len(rows),
        "geomean_ratio_all": geometric_mean([row.ratio for row in rows]),
        "min_ratio": min(row.ratio for row in rows),
        "max_ratio": max(row.ratio for row in rows),
        "selected": len(selected),
        "geomean_ratio_selected": geometric_mean(selected) if selected else 1.0,
        "mobilenet_v1_geomean_peak_share": geometric_mean(first) if first else 0.0,
        "fp32_rate_gflops_least": min(row.rate_gflops for row in rows),
        "fp32_rate_gflops_most": max(row.rate_gflops for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=Path, default=WORKLOADS)
    parser.add_argument("--trials", type=int, default=64, help="per kernel")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="shapes whose name starts with this")
    parser.add_argument("-o", "--output", type=Path, default=Path("build/kernels"))
    arguments = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(arguments.threads)
    pairs = [pair for pair in workloads(arguments.workloads) if pair[0].startswith(arguments.only)]
    print(HEADER)
    rows = measure(pairs, host_target(arguments.threads), arguments.output, arguments.trials)
    result = {"rows": [asdict(row) for row in rows], "summary": summary(rows)}
    (arguments.output / "kernels.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print("\n".join(f"{key}: {value:.3g}" for key, value in result["summary"].items()))


if __name__ == "__main__":
    main()
