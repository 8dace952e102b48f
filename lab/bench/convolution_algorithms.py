"""Direct convolution against every other algorithm that there is for it (Winograd's with each size of tiles, vectors of
neighbouring columns), layer by layer.

Of every algorithm the configurations of least analytic cost are verified and timed; then the best of each take turns in
one process (A B C A B C), and those times are reported: the least of several rounds. Rates count the multiply-adds of
the direct algorithm, so that they compare as times do; Winograd's may exceed what the machine can do.

    python -m lab.bench.convolution_algorithms --trials 12 --threads 2
    taskset -c 1 python -m lab.bench.convolution_algorithms --threads 1 --shapes 56x64 128x64:32
    python -m lab.bench.convolution_algorithms --shapes few
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.cpu_target import CpuTarget, host_target

ROUNDS = 5
# ResNet's four stages, YOLO's, and a U-Net's: side of the image x input channels.
SHAPES = ("56x64", "28x128", "14x256", "7x512", "80x64", "40x128", "128x64")
# Few channels, long windows: layers of Basic Pitch, SRCNN, ESPCN, a keyword spotter, M5 and CREPE.
FEW = (
    *("8x172x264:32/5x5", "32x172x264:8/3x39", "8x172x264:1/5x5", "1x172x264:32/7x7/1x3", "32x172x88:1/7x3"),
    *("33x172x88:1/3x3", "1x256x256:64/9x9", "32x256x256:1/5x5", "32x240x320:9/3x3", "1x98x40:64/20x8"),
    *("64x49x20:64/10x4", "1x16000x1:128/80x1/4x1", "16x128x1:16/64x1", "1x1024x1:128/512x1/4x1", "1x64x512:8/1x64"),
)


def layer(shape: str, batch: int) -> Conv2d:
    """Convolution of ``shape`` with bias and ReLU: ``SIDExCHANNELS``, or ``SIDExCHANNELS:OUTPUTS`` with another number
    of output channels. Any window is ``CHANNELSxHEIGHTxWIDTH:OUTPUTS/ROWSxCOLUMNS/STRIDES``.
    """
    if "/" in shape:
        return _window(shape, batch)
    side, _, channels = shape.partition("x")
    ins, _, outs = channels.partition(":")
    size = int(side)
    return Conv2d(
        batch, int(ins), size, size, int(outs or ins), (3, 3), padding=(1, 1, 1, 1), epilogue=Epilogue(True, "relu")
    )


def _window(shape: str, batch: int) -> Conv2d:
    image, window, *strides = shape.split("/")
    image, _, outputs = image.partition(":")
    channels, height, width = map(int, image.split("x"))
    rows, columns = map(int, window.split("x"))
    down, across = map(int, (strides or ["1x1"])[0].split("x"))
    around = (rows // 2, columns // 2, (rows - 1) // 2, (columns - 1) // 2)
    relu = Epilogue(True, "relu")
    return Conv2d(batch, channels, height, width, int(outputs), (rows, columns), (down, across), around, epilogue=relu)


def measure(shapes: Sequence[str], batch: int, cpu: CpuTarget, trials: int) -> None:
    """Print a row per shape and algorithm."""
    from schedules.kernels.template_table import template_for
    from schedules.measuring.measure_runner import Runner

    print("| layer | algorithm | us | direct / this | GFLOP/s of direct | configuration |\n|---|---|---|---|---|---|")
    with Runner(cpu, timeout_seconds=60.0) as runner:
        for shape in shapes:
            conv = layer(shape, batch)
            template = template_for(conv, cpu)
            assert template is not None
            spaces: dict[str, list] = {}
            for config in template.space(conv, cpu):
                spaces.setdefault(template.for_config(config).family, []).append(config)
            best = {}
            for algorithm in sorted(spaces):
                outcomes = list(runner.measure_batch(conv, spaces[algorithm][:trials]))
                found = [(outcome.seconds, config) for config, outcome in outcomes if outcome.seconds is not None]
                if not found:
                    raise SystemExit(f"{shape}, {algorithm}: {outcomes[0][1].message}")
                best[algorithm] = min(found, key=lambda each: each[0])[1]
            arms = [[(conv, config)] for config in best.values()]
            rounds = [[outcome.seconds for outcome in runner.compare(arms)] for _ in range(ROUNDS)]
            seconds = dict(zip(best, (min(times) for times in zip(*rounds, strict=True)), strict=True))
            for algorithm, config in best.items():
                mine = seconds[algorithm]
                knobs = ", ".join(f"{knob} {value}" for knob, value in config.items())
                image, window = " x ".join(map(str, conv.input_shape)), "x".join(map(str, conv.kernel))
                print(
                    f"| {image} -> {conv.out_channels}, {window} | {algorithm} "
                    f"| {mine * 1e6:.1f} | {seconds['conv2d'] / mine:.2f} | {conv.flops / mine / 1e9:.0f} | {knobs} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        help="SIDExCHANNELS[:OUTPUTS], any window (FEW in this file), or few: all of those",
    )
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--trials", type=int, default=12, help="configurations of each algorithm")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(arguments.threads)
    shapes = FEW if list(arguments.shapes) == ["few"] else arguments.shapes
    measure(shapes, arguments.batch, host_target(arguments.threads), arguments.trials)


if __name__ == "__main__":
    main()
