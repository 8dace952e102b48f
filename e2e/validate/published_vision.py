"""Steps of image models that NVIDIA has published: DeepLearningExamples, PyTorch/Classification/ConvNets (BSD-3).

``resnet50v1.5/README.md`` at 291f0d02 (NGC container 21.03; training of one GPU, inference latency on V100 and T4) and
``resnext101-32x4d/README.md`` at 46ff3707 (20.06), batch sizes and layouts by ``configs.yml`` at 097c7ff9: NHWC with
mixed precision, NCHW otherwise. Training is throughput over 100 iterations with DALI, SGD with momentum, label
smoothing; mixed precision has a static loss scale. No factor is fitted on any of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from e2e.capture.models.catalog import IMAGES, images_workload
from e2e.capture.models.timm_models import timm_module
from e2e.capture.options import CaptureOptions
from e2e.capture.session import capture
from e2e.lowering import LoweringOptions
from e2e.lowering.lowered_step import LoweredStep, lower_step

Precision = Literal["tf32", "amp", "float32"]


@dataclass(frozen=True)
class PublishedStep:
    """One published throughput, as seconds of a step of ``batch`` pictures."""

    model: str
    machine: str
    training: bool
    precision: Precision
    batch: int
    images_per_second: float

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.batch / self.images_per_second

    @property
    def compiled(self) -> bool:
        """None of them is."""
        return False

    @property
    def channels_last(self) -> bool:
        """As ``configs.yml`` has it."""
        return self.precision == "amp"

    @property
    def group(self) -> str:
        """Mode, layout and number types."""
        mode, layout = "train" if self.training else "infer", "nhwc" if self.channels_last else "nchw"
        return f"{mode}-{layout}-{self.precision}"

    @property
    def version(self) -> int:
        """PyTorch of the container, 1.8 (of 20.06: 1.6)."""
        return 18

    @property
    def name(self) -> str:
        """Card, group, model and batch."""
        return f"{self.machine}/{self.group}-nvidia/{self.model}-{self.batch}"


def _latencies(machine: str, precision: Precision, milliseconds: dict[int, float]) -> list[PublishedStep]:
    return [
        PublishedStep("resnet-50", machine, False, precision, batch, batch / (time * 1e-3))
        for batch, time in milliseconds.items()
    ]


_A100, _A100_40, _V100 = "a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm2-16gb"
PUBLISHED: tuple[PublishedStep, ...] = (
    PublishedStep("resnet-50", _A100, True, "tf32", 256, 938.0),
    PublishedStep("resnet-50", _A100, True, "amp", 256, 2470.0),
    PublishedStep("resnet-50", _V100, True, "float32", 112, 367.0),
    PublishedStep("resnet-50", _V100, True, "amp", 256, 1200.0),
    PublishedStep("resnext101_32x4d", _A100_40, True, "tf32", 128, 300.42),
    PublishedStep("resnext101_32x4d", _A100_40, True, "amp", 128, 908.4),
    PublishedStep("resnext101_32x4d", _V100, True, "float32", 64, 150.05),
    PublishedStep("resnext101_32x4d", _V100, True, "amp", 128, 534.91),
    *_latencies(_V100, "float32", {1: 10.37, 4: 10.46, 16: 16.07, 64: 55.4, 256: 214.48}),
    *_latencies(_V100, "amp", {1: 12.78, 4: 13.41, 16: 14.0, 64: 23.18, 256: 84.14}),
    *_latencies("t4", "float32", {8: 22.41, 16: 39.77, 64: 152.73, 256: 635.98}),
    *_latencies("t4", "amp", {1: 12.96, 4: 12.99, 16: 15.8, 64: 57.41, 256: 225.95}),
)


def lowered_published_step(step: PublishedStep) -> LoweredStep:
    """The step, captured and lowered; ResNet-50 is the built-in one, others are timm's."""
    options = CaptureOptions(
        mode="train" if step.training else "inference",
        layout="channels-last" if step.channels_last else "contiguous",
    )
    if step.model in IMAGES:
        make, side = IMAGES[step.model]
        with torch.device("meta"):
            module = make()
    else:
        module, side = timm_module(step.model)
    autocast = torch.float16 if step.precision == "amp" else None
    workload = images_workload(step.name, module, side, step.batch, options, autocast)
    return lower_step(capture(workload, options), LoweringOptions(tf32=step.precision == "tf32"))
