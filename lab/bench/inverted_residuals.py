"""Inverted residuals of large inputs in one kernel, in two and in three: 1x1 -> depthwise -> 1x1 (+ residual).

Of every kernel the configurations of least analytic cost are verified and timed; then the best of each way take turns
in one process (A B C D A B C D), and those times are reported: the least of several rounds. Beside them the roofline of
this machine: the time of three kernels over that of one, with and without overlap of memory and arithmetic.

    python -m lab.bench.inverted_residuals --trials 6
    python -m lab.bench.inverted_residuals --only "512" --dtypes bfloat16
"""

from __future__ import annotations

import argparse
import os
from statistics import geometric_mean

from costmodel.cpu.roofline import explain
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs, Operator
from fusion.analysis.target_machine import machine_for
from schedules.contract.cpu_target import CpuTarget, host_target

ROUNDS = 5
# Name: batch, side of the image in front of the depthwise layer, channels in, within and out, window, stride.
BLOCKS = {
    "MobileNetV2 at 512, second": (1, 256, 16, 96, 24, 3, 2),
    "MobileNetV2 at 512, third": (1, 128, 24, 144, 24, 3, 1),
    "MobileNetV3 at 512, 5x5": (1, 64, 40, 120, 40, 5, 1),
    "MobileNetV2 at 1080, third": (1, 270, 24, 144, 24, 3, 1),
    "MobileNetV2 at 224, batch 8, third": (8, 56, 24, 144, 24, 3, 1),
    "MobileNetV2 at 224, batch 8, sixth": (8, 28, 32, 192, 32, 3, 1),
}


def block(sizes: tuple[int, ...], dtype: str) -> FusedConvs:
    """The three layers of a block, with a residual if the shapes allow it."""
    batch, side, inputs, middle, outputs, kernel, stride = sizes
    clipped = Epilogue(True, "relu6" if dtype != "int8" else None)
    first = Conv2d(batch, inputs, side, side, middle, (1, 1), epilogue=clipped, dtype=dtype)
    half = (kernel - 1) // 2
    window = Conv2d(
        batch, middle, side, side, middle, (kernel, kernel), (stride, stride), (half,) * 4, groups=middle,
        epilogue=clipped, dtype=dtype,
    )  # fmt: skip
    last = Epilogue(True, None, "before_activation") if stride == 1 and inputs == outputs else Epilogue(True)
    shape = (batch, middle, window.out_height, window.out_width)
    return FusedConvs((first, window, Conv2d(*shape, outputs, (1, 1), epilogue=last, dtype=dtype)))


def ways(whole: FusedConvs) -> dict[str, list[Operator]]:
    """Ways to compute ``whole`` by separate or fused kernels, by name."""
    first, window, last = whole.convs
    return {
        "three": [first, window, last],
        "1x1 and depthwise, 1x1": [FusedConvs((first, window)), last],
        "1x1, depthwise and 1x1": [first, FusedConvs((window, last))],
        "one": [whole],
    }


def measure(name: str, dtype: str, cpu: CpuTarget, machine: Machine, trials: int) -> float | None:
    """Print a row; returns the time of three kernels over that of the best way, ``None`` if a kernel could not be
    measured.
    """
    from schedules.kernels.template_table import template_for
    from schedules.measuring.measure_runner import Runner

    whole = block(BLOCKS[name], dtype)
    arms = ways(whole)
    with Runner(cpu, timeout_seconds=60.0) as runner:
        best = {}
        for operator in {each: None for arm in arms.values() for each in arm}:
            template = template_for(operator, cpu)
            if template is None:
                continue
            outcomes = list(runner.measure_batch(operator, list(template.space(operator, cpu))[:trials]))
            found = [(outcome.seconds, config) for config, outcome in outcomes if outcome.seconds is not None]
            if found:
                best[operator] = min(found, key=lambda each: each[0])[1]
        arms = {way: arm for way, arm in arms.items() if all(operator in best for operator in arm)}
        if "three" not in arms or len(arms) < 2:
            print(f"| {name} | {dtype} | not measured |", flush=True)
            return None
        candidates = [[(operator, best[operator]) for operator in arm] for arm in arms.values()]
        rounds = [[outcome.seconds for outcome in runner.compare(candidates)] for _ in range(ROUNDS)]
    seconds = dict(zip(arms, (min(times) for times in zip(*rounds, strict=True)), strict=True))
    separate = [explain(each, machine, cpu.threads) for each in arms["three"]]
    fused = explain(whole, machine, cpu.threads)
    told = sum(each.seconds for each in separate) / fused.seconds
    serial = sum(each.serial_seconds for each in separate) / fused.serial_seconds
    cells = [f"{seconds[way] * 1e6:.0f}" if way in seconds else "-" for way in ways(whole)]
    gain = seconds["three"] / min(seconds.values())
    print(f"| {name} | {dtype} | {' | '.join(cells)} | {gain:.2f} | {told:.2f} | {serial:.2f} |", flush=True)
    return gain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="blocks whose name contains this")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--trials", type=int, default=6, help="configurations of each kernel")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(arguments.threads)
    cpu = host_target(arguments.threads)
    machine = machine_for(None, cpu.threads, print)
    heads = ["block", "stored as", *(f"{way}, us" for way in ways(block(BLOCKS[next(iter(BLOCKS))], "float32")))]
    heads += ["three / best", "roofline: three / one", "without overlap"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    dtypes = [each for each in arguments.dtypes if cpu.lacks(each) is None]
    names = [name for name in BLOCKS if arguments.only in name]
    gains = [measure(name, dtype, cpu, machine, arguments.trials) for name in names for dtype in dtypes]
    known = [gain for gain in gains if gain is not None]
    if known:
        print(f"geometric mean of {len(known)}: {geometric_mean(known):.2f}")


if __name__ == "__main__":
    main()
