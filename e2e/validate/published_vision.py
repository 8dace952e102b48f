"""Steps of image models that NVIDIA has published: DeepLearningExamples, PyTorch/Classification/ConvNets (BSD-3).

``resnet50v1.5/README.md`` at 291f0d02 and ``se-resnext101-32x4d/README.md`` at 0107cf27 (NGC container 21.03; training
of one GPU, inference on V100 and T4), ``resnext101-32x4d/README.md`` at 46ff3707 (20.06, training), batch sizes and
layouts by ``configs.yml`` at 097c7ff9: NHWC with mixed precision, NCHW otherwise. A step is run as the script runs it
(:mod:`e2e.validate.published_script`): by ``launch.py`` and ``configs.yml`` (PyTorch's loader, mixup, gradients of some
1,000 or 2,000 pictures added up), ResNeXt by the command of its page (DALI on the CPU, none of these). No factor is
fitted on any of them. ResNeXt's inference is left out: its table of T4 has 449 pictures a second in FP32, 89 % of the
datasheet's arithmetic (8.1 TFLOP/s), where the card reaches half of that and SE-ResNeXt 171.

Figures are averages over 100 iterations, the first of which tries the algorithms of convolutions
(``cudnn.benchmark``). It moves the mean of the latencies of 21.03 above their own 95th percentile (84 ms, 75 ms; 256
pictures on V100), but the mean of the throughputs by a hundredth: it is these that are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from e2e.capture.models.catalog import IMAGES
from e2e.capture.models.timm_models import timm_module
from e2e.sources.known_requests import Script
from e2e.validate.published_script import ScriptRun, scripted_workload

Precision = Literal["tf32", "amp", "float32"]


@dataclass(frozen=True)
class PublishedStep:
    """One published throughput, as seconds of a step of ``batch`` pictures, ``run.batches`` times over in training."""

    model: str
    machine: str
    training: bool
    precision: Precision
    batch: int
    images_per_second: float
    run: ScriptRun

    @property
    def seconds(self) -> float:
        """Of one step of the optimizer, or of one batch that is validated."""
        return self.run.batches * self.batch / self.images_per_second

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


_RESNET, _RESNEXT, _SE_RESNEXT = "resnet-50", "resnext101_32x4d", "seresnext101_32x4d"
_A100, _A100_40, _V100 = "a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm2-16gb"
# The command of its page.
_BY_PAGE = ScriptRun("dali-cpu", divides=True)


def _trained(
    machine: str, precision: Precision, batch: int, rate: float, model: str = _RESNET, optimizer_batch: int = 2048
) -> PublishedStep:
    """By ``launch.py``; ``optimizer_batch``: pictures of a step of the optimizer (``resnet_params_2k`` and others)."""
    run = ScriptRun("pytorch", mixup=True, batches=optimizer_batch // batch)
    return PublishedStep(model, machine, True, precision, batch, rate, run)


def _validated(
    model: str, machine: str, precision: Precision, rates: dict[int, float], run: ScriptRun
) -> list[PublishedStep]:
    return [PublishedStep(model, machine, False, precision, batch, rate, run) for batch, rate in rates.items()]


PUBLISHED: tuple[PublishedStep, ...] = (
    _trained(_A100, "tf32", 256, 938.0),
    _trained(_A100, "amp", 256, 2470.0),
    _trained(_V100, "float32", 112, 367.0),
    _trained(_V100, "amp", 256, 1200.0),
    _trained(_A100, "tf32", 128, 395.0, _SE_RESNEXT, 1024),
    _trained(_A100, "amp", 128, 855.0, _SE_RESNEXT, 1024),
    _trained(_V100, "float32", 64, 132.0, _SE_RESNEXT, 1024),
    _trained(_V100, "amp", 112, 443.0, _SE_RESNEXT, 896),
    PublishedStep(_RESNEXT, _A100_40, True, "tf32", 128, 300.42, _BY_PAGE),
    PublishedStep(_RESNEXT, _A100_40, True, "amp", 128, 908.4, _BY_PAGE),
    PublishedStep(_RESNEXT, _V100, True, "float32", 64, 150.05, _BY_PAGE),
    PublishedStep(_RESNEXT, _V100, True, "amp", 128, 534.91, _BY_PAGE),
    *_validated(_RESNET, _V100, "float32", {1: 96, 4: 386, 16: 1023, 64: 1200, 256: 1261}, ScriptRun()),
    *_validated(_RESNET, _V100, "amp", {1: 78, 4: 300, 16: 1178, 64: 2984, 256: 3382}, ScriptRun()),
    *_validated(_RESNET, "t4", "float32", {8: 363, 16: 409, 64: 428, 256: 415}, ScriptRun()),
    *_validated(_RESNET, "t4", "amp", {1: 79, 4: 317, 16: 1050, 64: 1165, 256: 1198}, ScriptRun()),
    *_validated(_SE_RESNEXT, _V100, "float32", {16: 363, 64: 472, 256: 508}, ScriptRun()),
    *_validated(_SE_RESNEXT, _V100, "amp", {16: 459, 64: 1416, 256: 1576}, ScriptRun()),
    *_validated(_SE_RESNEXT, "t4", "float32", {16: 164, 64: 171, 256: 158}, ScriptRun()),
    *_validated(_SE_RESNEXT, "t4", "amp", {16: 482, 64: 527, 256: 527}, ScriptRun()),
)


def published_request(step: PublishedStep) -> Script:
    """What a user would ask for ``step``, with NVIDIA's script."""
    return Script(script=partial(_scripted, step), gpu=step.machine)


def _scripted(step: PublishedStep) -> tuple[torch.nn.Module, Callable[[], object]]:
    """The model and a step of it; ResNet-50 is the built-in one, others are timm's."""
    if step.model in IMAGES:
        make, side = IMAGES[step.model]
        module = make()
    else:
        module, side = timm_module(step.model)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = step.precision == "tf32"
    workload = scripted_workload(
        step.name,
        module,
        side,
        step.batch,
        step.run,
        training=step.training,
        channels_last=step.channels_last,
        mixed_precision=step.precision == "amp",
    )
    if step.training:
        return workload.module, workload.step
    return workload.module, torch.inference_mode()(workload.step)
