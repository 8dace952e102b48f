"""Pairs with a dense k x k convolution: one kernel against the best two, predicted and measured.

Of every kernel and each of its algorithms the configurations of least analytic cost are verified and timed; then the
best pair and the best two kernels take turns in one process (A B A B): the least of several rounds counts. A pair is
``SIDExCHANNELS,LAYER,LAYER``, a layer ``KERNELxOUTPUTS``, with a stride ``KERNEL/STRIDExOUTPUTS``; ``dw`` for outputs
makes it depthwise.

    python -m lab.bench.conv_pairs --trials 8
    python -m lab.bench.conv_pairs --predict --machine xeon-amx-2c
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from costmodel.cpu.roofline import RooflineModel
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs, Operator
from fusion.analysis.target_machine import machine_for
from schedules.contract.cpu_target import CpuTarget, host_target

ROUNDS = 7
# Bottlenecks and basic blocks of ResNet, heads and stems of YOLO, double convolutions of U-Nets, fire modules.
SHAPES = (
    *("56x64,3x64,1x256", "28x128,3x128,1x512", "56x128,3/2x128,1x512", "112x32,3x32,1x64", "80x64,3x64,1x80"),
    *("56x256,1x64,3x64", "14x1024,1x256,3x256", "80x64,1x32,3x32", "56x16,1x64,3x64", "160x32,1x16,3x16"),
    *("56x64,3x64,3x64", "28x128,3x128,3x128", "320x16,3x16,3x16", "256x32,3x32,3x32", "512x16,3x16,3x16"),
    *("640x3,3/2x16,3/2x32", "640x3,6/2x16,3/2x32", "224x3,3/2x32,3x32", "224x3,3/2x32,3xdw", "320x3,3/2x16,1x16"),
)


def pair(shape: str, batch: int) -> FusedConvs:
    """The two convolutions of ``shape``, with half the window as padding, bias and ReLU."""
    image, *layers = shape.split(",")
    side, channels = (int(value) for value in image.split("x"))
    height, convs = side, []
    for layer in layers:
        window, _, outputs = layer.partition("x")
        kernel, _, stride = window.partition("/")
        groups = channels if outputs == "dw" else 1
        convs.append(
            Conv2d(
                batch,
                channels,
                height,
                height,
                channels if groups > 1 else int(outputs),
                (int(kernel),) * 2,
                (int(stride or 1),) * 2,
                ((int(kernel) - (int(kernel) % 2 == 0)) // 2,) * 4,
                groups=groups,
                epilogue=Epilogue(True, "relu"),
            )  # fmt: skip
        )
        height, channels = convs[-1].out_height, convs[-1].out_channels
    return FusedConvs(tuple(convs))


def measured(pairs: Sequence[FusedConvs], cpu: CpuTarget, trials: int) -> list[tuple[float, float, str]]:
    """Seconds of the two separate kernels and of the fused one, and the algorithms of all three, for every pair."""
    from schedules.kernels.template_table import template_for
    from schedules.measuring.measure_runner import Runner

    def best(operator: Operator, runner: Runner) -> tuple[dict, str]:
        template = template_for(operator, cpu)
        assert template is not None
        spaces: dict[str, list] = {}
        for config in template.space(operator, cpu):
            spaces.setdefault(template.for_config(config).family, []).append(config)
        tried = [config for configs in spaces.values() for config in configs[:trials]]
        outcomes = list(runner.measure_batch(operator, tried))
        found = [(outcome.seconds, config) for config, outcome in outcomes if outcome.seconds is not None]
        if not found:
            raise SystemExit(f"{operator}: {outcomes[0][1].message}")
        config = min(found, key=lambda each: each[0])[1]
        return config, template.for_config(config).family

    rows = []
    with Runner(cpu, timeout_seconds=60.0) as runner:
        for fused in pairs:
            chosen = {operator: best(operator, runner) for operator in dict.fromkeys((*fused.convs, fused))}
            arms = [[(each, chosen[each][0]) for each in arm] for arm in (fused.convs, (fused,))]
            rounds = [[outcome.seconds for outcome in runner.compare(arms)] for _ in range(ROUNDS)]
            apart, together = (min(times) for times in zip(*rounds, strict=True))
            names = " + ".join(chosen[conv][1] for conv in fused.convs)
            rows.append((apart, together, f"{names}; {chosen[fused][1]} {chosen[fused][0]}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="SIDExCHANNELS,KERNEL[/STRIDE]xOUTPUTS,...")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--trials", type=int, default=8, help="configurations of each algorithm")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--machine", help="predict for this one (default: this CPU, as it was calibrated)")
    parser.add_argument("--predict", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(arguments.threads)
    roofline = RooflineModel(machine_for(arguments.machine, arguments.threads, print), arguments.threads)
    titles = ["pair", "predicted us, two -> one", "apart / fused", "without overlap"]
    if not arguments.predict:
        titles += ["measured us, two -> one", "apart / fused", "kernels"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for shape in arguments.shapes:
        fused = pair(shape, arguments.batch)
        one, two = roofline.explain(fused), [roofline.explain(conv) for conv in fused.convs]
        apart, serial = sum(each.seconds for each in two), sum(each.serial_seconds for each in two)
        cells = [f"{fused.kind} {shape}", f"{apart * 1e6:.0f} -> {one.seconds * 1e6:.0f}", f"{apart / one.seconds:.2f}"]
        cells.append(f"{serial / one.serial_seconds:.2f}")
        if not arguments.predict:
            ((two, one, names),) = measured([fused], host_target(arguments.threads), arguments.trials)
            cells += [f"{two * 1e6:.0f} -> {one * 1e6:.0f}", f"{two / one:.2f}", names]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
