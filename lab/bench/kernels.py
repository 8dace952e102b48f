"""Ways to compute some layers on this CPU, in turns: fused or separate kernels, one algorithm or another.

A case has several ways; each way is a list of kernels run one after the other. The best configuration of every kernel
is searched first; then the ways take turns in one process (A B C A B C): the least of several rounds counts. Rates
count the operations of the layers, not those of an algorithm, so that Winograd's may exceed what the machine can do.

``published``   depthwise -> 1x1, the shapes of fusion_workloads.csv (MobileNetV1, V2, MNASNet), every kernel tuned with
                the same effort; a run goes on from the records of the one before
``pairs``       two convolutions of which one is a dense k x k. ``SIDExCHANNELS,LAYER,LAYER``, a layer
                ``KERNELxOUTPUTS``, with a stride ``KERNEL/STRIDExOUTPUTS``; ``dw`` for outputs makes it depthwise
``algorithms``  every algorithm of a 3x3 convolution. ``CHANNELSxHEIGHTxWIDTH:OUTPUTS/ROWSxCOLUMNS/STRIDES``
``few``         the same for few channels and long windows
``residuals``   inverted residuals of large inputs in one, two and three kernels

In all but the first set the configurations of least analytic cost of every algorithm are tried. Beside the times are
the roofline of this machine, with and without overlap of memory and arithmetic, and the share of the rate of FP32
multiply-adds, measured in the same minute: on a shared machine that changes by a fifth within an hour.

    python -m lab.bench.kernels published --trials 16
    python -m lab.bench.kernels pairs --predict --machine xeon-amx-2c
    taskset -c 1 python -m lab.bench.kernels algorithms --threads 1 --shapes 64x56x56:64/3x3
    python -m lab.bench.kernels residuals --only bfloat16 --trials 5
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated

import typer

from costmodel.base.errors import InputError
from costmodel.cost_model import Config
from costmodel.cpu.calibration import compile_microbenchmarks
from costmodel.cpu.roofline import RooflineModel
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs, Operator
from fusion.analysis.target_machine import machine_for
from lab.command_line import program, run
from lab.data.data_folder import data_folder
from schedules.contract.cpu_target import CpuTarget, host_target

if TYPE_CHECKING:
    from schedules.measuring.measure_runner import Runner

ROUNDS = 5
# Operator, and the algorithm by which to compute it; empty: by whichever is the fastest.
Kernel = tuple[Operator, str]


@dataclass(frozen=True)
class Case:
    """Layers and the ways to compute them; times are compared with the first way."""

    name: str
    ways: Mapping[str, Sequence[Kernel]]

    @property
    def flops(self) -> float:
        """Operations of the layers."""
        return sum(operator.flops for operator, _ in next(iter(self.ways.values())))

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels of all ways."""
        return [kernel for way in self.ways.values() for kernel in way]


@dataclass(frozen=True)
class Row:
    """Measured way of a case. ``gain``: time of the first way over that of this one."""

    case: str
    way: str
    seconds: float
    gain: float
    gflops: float
    # Share of the rate of FP32 multiply-adds in the same minute; None if that cannot be measured.
    rate_share: float | None
    kernels: str


RELU, RELU6, LINEAR = Epilogue(True, "relu"), Epilogue(True, "relu6"), Epilogue(True, None)


def _any(operators: Sequence[Operator]) -> list[Kernel]:
    return [(operator, "") for operator in operators]


def published(shapes: Sequence[str], cpu: CpuTarget) -> Iterator[Case]:
    """Yield the distinct depthwise -> 1x1 pairs with SAME padding and the activations of their networks."""
    path, seen = data_folder() / "fusion_workloads.csv", set()
    if not path.is_file():
        raise InputError(f"{path}: not there; docs/measurements.md says where the shapes are from")
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["first"] != "depthwise_conv2d" or (fused := _published(row)) in seen:
                continue
            seen.add(fused)
            _, channels, height, width = fused.input_shape
            shape = f"{height}x{width}x{channels} /{fused.convs[0].stride[0]} -> {fused.output_shape[1]}"
            yield Case(f"{row['name']}, {shape}", {"separate": _any(fused.convs), "fused": _any([fused])})


def _published(row: Mapping[str, str]) -> FusedConvs:
    number = {key: int(row[key]) for key in row if key not in ("name", "first", "second")}
    kernel, stride, channels = number["first_kernel"], number["first_stride"], number["in_channels"]
    height, width = number["height"], number["width"]
    totals = [max(0, (-(-size // stride) - 1) * stride + kernel - size) for size in (height, width)]
    pads = (totals[0] // 2, totals[1] // 2, -(-totals[0] // 2), -(-totals[1] // 2))
    depthwise = Conv2d(
        number["batch"], channels, height, width, channels, (kernel, kernel), (stride, stride), pads, groups=channels,
        epilogue=RELU6,
    )  # fmt: skip
    # MobileNetV1 has an activation after its 1x1 convolution, the projections of V2 and MNASNet are linear.
    last = RELU6 if row["name"].startswith("mv1") else LINEAR
    shape = (number["batch"], channels, depthwise.out_height, depthwise.out_width)
    return FusedConvs((depthwise, Conv2d(*shape, number["second_out_channels"], (1, 1), epilogue=last)))


# Bottlenecks and basic blocks of ResNet, heads and stems of YOLO, double convolutions of U-Nets, fire modules.
PAIRS = (
    *("56x64,3x64,1x256", "28x128,3x128,1x512", "56x128,3/2x128,1x512", "112x32,3x32,1x64", "80x64,3x64,1x80"),
    *("56x256,1x64,3x64", "14x1024,1x256,3x256", "80x64,1x32,3x32", "56x16,1x64,3x64", "160x32,1x16,3x16"),
    *("56x64,3x64,3x64", "28x128,3x128,3x128", "320x16,3x16,3x16", "256x32,3x32,3x32", "512x16,3x16,3x16"),
    *("640x3,3/2x16,3/2x32", "640x3,6/2x16,3/2x32", "224x3,3/2x32,3x32", "224x3,3/2x32,3xdw", "320x3,3/2x16,1x16"),
)


def pairs(shapes: Sequence[str], cpu: CpuTarget) -> Iterator[Case]:
    """Yield pairs of convolutions, with half the window as padding, bias and ReLU."""
    for shape in shapes or PAIRS:
        fused = FusedConvs(tuple(_chain(shape)))
        yield Case(f"{fused.kind} {shape}", {"separate": _any(fused.convs), "fused": _any([fused])})


def _chain(shape: str) -> Iterator[Conv2d]:
    image, *layers = shape.split(",")
    height, channels = (int(value) for value in image.split("x"))
    for layer in layers:
        window, _, outputs = layer.partition("x")
        kernel, _, stride = window.partition("/")
        groups, size = channels if outputs == "dw" else 1, int(kernel)
        conv = Conv2d(
            1, channels, height, height, channels if outputs == "dw" else int(outputs), (size, size),
            (int(stride or 1),) * 2, ((size - (size % 2 == 0)) // 2,) * 4, groups=groups, epilogue=RELU,
        )  # fmt: skip
        yield conv
        height, channels = conv.out_height, conv.out_channels


# ResNet's four stages, YOLO's, and a U-Net's.
DENSE = (
    *("64x56x56:64/3x3", "128x28x28:128/3x3", "256x14x14:256/3x3", "512x7x7:512/3x3", "64x80x80:64/3x3"),
    *("128x40x40:128/3x3", "64x128x128:64/3x3"),
)
# Few channels, long windows: layers of Basic Pitch, SRCNN, ESPCN, a keyword spotter, M5 and CREPE.
FEW = (
    *("8x172x264:32/5x5", "32x172x264:8/3x39", "8x172x264:1/5x5", "1x172x264:32/7x7/1x3", "32x172x88:1/7x3"),
    *("33x172x88:1/3x3", "1x256x256:64/9x9", "32x256x256:1/5x5", "32x240x320:9/3x3", "1x98x40:64/20x8"),
    *("64x49x20:64/10x4", "1x16000x1:128/80x1/4x1", "16x128x1:16/64x1", "1x1024x1:128/512x1/4x1", "1x64x512:8/1x64"),
)


def algorithms(shapes: Sequence[str], cpu: CpuTarget) -> Iterator[Case]:
    """Yield convolutions with bias and ReLU, each by every algorithm that there is for it; direct sums first."""
    from schedules.kernels.template_table import template_for

    for shape in shapes or DENSE:
        conv = _window(shape)
        template = template_for(conv, cpu)
        assert template is not None
        families = {template.for_config(config).family for config in template.space(conv, cpu)}
        order = sorted(families, key=lambda family: (family != "conv2d", family))
        yield Case(shape, {family: [(conv, family)] for family in order})


def _window(shape: str) -> Conv2d:
    image, window, *strides = shape.split("/")
    image, _, outputs = image.partition(":")
    channels, height, width = map(int, image.split("x"))
    rows, columns = map(int, window.split("x"))
    down, across = map(int, (strides or ["1x1"])[0].split("x"))
    around = (rows // 2, columns // 2, (rows - 1) // 2, (columns - 1) // 2)
    return Conv2d(1, channels, height, width, int(outputs), (rows, columns), (down, across), around, epilogue=RELU)


# Name: batch, side of the image in front of the depthwise layer, channels in, within and out, window, stride.
BLOCKS = {
    "MobileNetV2 at 512, second": (1, 256, 16, 96, 24, 3, 2),
    "MobileNetV2 at 512, third": (1, 128, 24, 144, 24, 3, 1),
    "MobileNetV3 at 512, 5x5": (1, 64, 40, 120, 40, 5, 1),
    "MobileNetV2 at 1080, third": (1, 270, 24, 144, 24, 3, 1),
    "MobileNetV2 at 224, batch 8, third": (8, 56, 24, 144, 24, 3, 1),
    "MobileNetV2 at 224, batch 8, sixth": (8, 28, 32, 192, 32, 3, 1),
}


def residuals(shapes: Sequence[str], cpu: CpuTarget) -> Iterator[Case]:
    """Yield 1x1 -> depthwise -> 1x1 (with a residual if the shapes allow it) in every type that the CPU has."""
    for name, sizes in BLOCKS.items():
        for dtype in ("float32", "bfloat16", "int8"):
            if cpu.lacks(dtype) is None:
                first, window, last = layers = _block(sizes, dtype)
                ways: dict[str, list[Operator]] = {
                    "three": [first, window, last],
                    "1x1 and depthwise, 1x1": [FusedConvs((first, window)), last],
                    "1x1, depthwise and 1x1": [first, FusedConvs((window, last))],
                    "one": [FusedConvs(layers)],
                }
                yield Case(f"{name}, {dtype}", {way: _any(operators) for way, operators in ways.items()})


def _block(sizes: tuple[int, ...], dtype: str) -> tuple[Conv2d, Conv2d, Conv2d]:
    batch, side, inputs, middle, outputs, kernel, stride = sizes
    clipped = Epilogue(True, "relu6" if dtype != "int8" else None)
    window = Conv2d(
        batch, middle, side, side, middle, (kernel, kernel), (stride, stride), ((kernel - 1) // 2,) * 4, groups=middle,
        epilogue=clipped, dtype=dtype,
    )  # fmt: skip
    shape = (batch, middle, window.out_height, window.out_width)
    last = Epilogue(True, None, "before_activation") if stride == 1 and inputs == outputs else Epilogue(True)
    return (
        Conv2d(batch, inputs, side, side, middle, (1, 1), epilogue=clipped, dtype=dtype),
        window,
        Conv2d(*shape, outputs, (1, 1), epilogue=last, dtype=dtype),
    )


SETS: dict[str, Callable[[Sequence[str], CpuTarget], Iterator[Case]]] = {
    "published": published,
    "pairs": pairs,
    "algorithms": algorithms,
    "few": lambda shapes, cpu: algorithms(shapes or FEW, cpu),
    "residuals": residuals,
}


def of_least_cost(kernels: Collection[Kernel], runner: Runner, cpu: CpuTarget, trials: int) -> dict[Kernel, Config]:
    """Best of the ``trials`` configurations of least analytic cost of each algorithm."""
    from schedules.kernels.template_table import template_for

    best: dict[Kernel, Config] = {}
    for operator, algorithm in dict.fromkeys(kernels):
        template = template_for(operator, cpu)
        if template is None:
            continue
        spaces: dict[str, list[Config]] = {}
        for config in template.space(operator, cpu):
            spaces.setdefault(template.for_config(config).family, []).append(config)
        tried = [config for name, configs in spaces.items() if algorithm in ("", name) for config in configs[:trials]]
        outcomes = runner.measure_batch(operator, tried)
        times = [(outcome.seconds, config) for config, outcome in outcomes if outcome.seconds is not None]
        if times:
            best[operator, algorithm] = min(times, key=lambda each: each[0])[1]
    return best


def tuned(
    kernels: Collection[Kernel], runner: Runner, cpu: CpuTarget, trials: int, roofline: RooflineModel, folder: Path
) -> dict[Kernel, Config]:
    """Best configurations found by the tuner in ``trials`` of each kernel; records are in ``folder``."""
    from costmodel.cpu.learned_residual import ResidualModel
    from schedules.kernels.template_table import config_terms
    from schedules.tuning.kernel_tuner import Tuner, TuningProgress, TuningTask
    from schedules.tuning.tuning_records import RecordStore

    def progress(state: TuningProgress) -> None:
        if state.trial % 100 == 0 and state.stage == "search":
            left = f"{state.eta_seconds / 60:.0f} min left"
            print(f"  trial {state.trial} of {state.trials}, {left}", file=sys.stderr, flush=True)

    model = ResidualModel(roofline, config_terms=partial(config_terms, cpu=cpu))
    operators = sorted({operator for operator, _ in kernels}, key=repr)
    with RecordStore(folder, cpu) as store:
        Tuner(store, cpu, model, runner, progress).tune([TuningTask(operator, trials) for operator in operators])
        records = {operator: store.best(operator) for operator in operators}
    return {kernel: record.config for kernel in kernels if (record := records[kernel[0]]) is not None}


def measure(case: Case, best: Mapping[Kernel, Config], runner: Runner, rate: Callable[[], float | None]) -> list[Row]:
    """Rows of the ways of ``case`` whose kernels are all in ``best``; none without the first way."""
    ways = {way: kernels for way, kernels in case.ways.items() if all(kernel in best for kernel in kernels)}
    first = next(iter(case.ways))
    if first not in ways:
        return []
    arms = [[(kernel[0], best[kernel]) for kernel in kernels] for kernels in ways.values()]
    # Another process may occupy a core for longer than one comparison lasts: use the least of several runs.
    times: dict[str, list[float]] = {way: [] for way in ways}
    rates = [rate()]
    for _ in range(ROUNDS):
        for way, outcome in zip(ways, runner.compare(arms), strict=True):
            times[way] += [] if outcome.seconds is None else [outcome.seconds]
        rates.append(rate())
    seconds = {way: min(found) for way, found in times.items() if found}
    if first not in seconds:
        return []
    most = max((each for each in rates if each is not None), default=None)
    return [
        Row(
            case.name,
            way,
            taken,
            seconds[first] / taken,
            case.flops / taken / 1e9,
            None if most is None else case.flops / taken / most,
            " + ".join(_knobs(best[kernel]) for kernel in ways[way]),
        )
        for way, taken in seconds.items()
    ]


def _knobs(config: Config) -> str:
    return ", ".join(f"{knob} {value}" for knob, value in config.items())


HEADS = ("case", "way", "roofline us", "without overlap", "us", "first / this", "GFLOP/s", "of FP32 rate", "kernels")


def cells(way: Sequence[Kernel], roofline: RooflineModel, row: Row | None) -> list[str]:
    """Cells of :data:`HEADS` after the way's name; those of a measurement are empty without one."""
    reports = [roofline.explain(operator) for operator, _ in way]
    found = [f"{sum(getattr(each, name) for each in reports) * 1e6:.1f}" for name in ("seconds", "serial_seconds")]
    if row is None:
        return [*found, *[""] * 5]
    share = "" if row.rate_share is None else f"{row.rate_share:.0%}"
    return [*found, f"{row.seconds * 1e6:.1f}", f"{row.gain:.2f}", f"{row.gflops:.0f}", share, row.kernels]


def kernels_command(
    name: Annotated[str, typer.Argument(metavar="SET", help=f"Of {', '.join(SETS)}.")] = "published",
    shapes: Annotated[str, typer.Option(help="Shapes of your own, by spaces, in the set's notation.")] = "",
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    trials: Annotated[int, typer.Option(min=1, help="Configurations of a kernel, or of each of its algorithms.")] = 16,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    machine: Annotated[str | None, typer.Option(help="Predict for this one; default: this CPU, calibrated.")] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Measure nothing.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of records and figures.")] = Path(
        "build/kernels"
    ),
) -> None:
    """Compute layers in several ways, in turns, beside the roofline."""
    from schedules.measuring.measure_runner import Runner

    if name not in SETS:
        raise InputError(f"{name}: no such set; choose of {', '.join(SETS)}")
    os.environ["TVM_NUM_THREADS"] = str(threads)
    cpu = host_target(threads)
    roofline = RooflineModel(machine_for(machine, threads, print), threads)
    try:
        cases = [case for case in SETS[name](shapes.split(), cpu) if only in case.name]
    except ValueError:
        raise InputError(
            f"--shapes {shapes}: not in the notation of {name}; see the top of lab/bench/kernels.py"
        ) from None
    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
    if predict:
        for case in cases:
            for way, kernels in case.ways.items():
                print(f"| {' | '.join([case.name, way, *cells(kernels, roofline, None)])} |")
        return
    output.mkdir(parents=True, exist_ok=True)
    benchmarks = compile_microbenchmarks(output)

    def rate() -> float | None:
        """FP32 operations per second of all threads, the best of 30 samples of 3 ms."""
        sample = benchmarks.rate("fma_float32", threads, 30)
        return None if sample is None else sample.best

    rows: list[Row] = []
    with Runner(cpu, timeout_seconds=60.0) as runner:
        best: Mapping[Kernel, Config] = {}
        if name == "published":
            best = tuned([kernel for case in cases for kernel in case.kernels], runner, cpu, trials, roofline, output)
        for case in cases:
            if name != "published":
                best = of_least_cost(case.kernels, runner, cpu, trials)
            found = measure(case, best, runner, rate)
            if not found:
                print(f"| {case.name} | not measured |{' |' * (len(HEADS) - 2)}", flush=True)
            for row in found:
                line = [case.name, row.way, *cells(case.ways[row.way], roofline, row)]
                print(f"| {' | '.join(line)} |", flush=True)
            rows += found
    (output / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    gains = best_gains(rows)
    if gains:
        spread = f"({min(gains):.2f} to {max(gains):.2f})"
        print(f"{len(gains)} cases, the first way over the best: geometric mean {geometric_mean(gains):.2f} {spread}")


def best_gains(rows: Sequence[Row]) -> list[float]:
    """Time of the first way over that of the other one, or of the fastest of all where there are more, by case."""
    by_case: dict[str, list[Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    return [
        ways[1].gain if len(ways) == 2 else max(row.gain for row in ways) for ways in by_case.values() if len(ways) > 1
    ]


if __name__ == "__main__":
    sys.exit(run(program(kernels_command), "lab.bench.kernels"))
