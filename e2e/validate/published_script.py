"""A step of NVIDIA's image classifiers as their own script runs it.

DeepLearningExamples, PyTorch/Classification/ConvNets (BSD-3), ``main.py`` and
``image_classification/{training,dataloaders,mixup}.py`` at 097c7ff9 and 46ff3707.

Beside the network a step there

* makes pictures of bytes: PyTorch's loader hands over bytes in the network's layout, which three kernels turn into FP32
  (``PrefetchedWrapper``; on a stream of their own, but they need the same memory: in turn here); DALI's
  ``CropMirrorNormalize`` is one kernel, whose NCHW is then copied into the layout. JPEG is decoded by the CPU in both;
* mixes every picture with another one, and its label with that one's (``mixup``), where ``configs.yml`` says so;
* adds up the gradients of several batches before the optimizer runs (``optimizer_batch_size``), which fill zeros
  instead of taking the place of nothing (PyTorch before 2.0); the optimizer runs tensor by tensor, as there was no
  other form of it;
* scales the loss, and unscales the gradients, where precision is mixed;
* waits for the GPU behind every batch, so that the next one's first kernels wait for the host.

Validation adds the loss and the two accuracies. What is left out: labels and loss as they travel, logging (outside
the time that is measured).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from e2e.capture.session import CapturedWorkload

CLASSES = 1000
_MIXED, _SMOOTHING, _MOMENTUM, _DECAY, _SCALE = 0.2, 0.1, 0.875, 3e-5, 128.0


@dataclass(frozen=True)
class ScriptRun:
    """How the script was called. ``loader``: what hands over the pictures; ``mixup``: pictures and labels are mixed,
    labels smoothed; ``batches``: of one step of the optimizer; ``divides``: gradients are divided by their number in a
    kernel each (46ff3707), not the loss.
    """

    loader: Literal["pytorch", "dali-cpu"] = "pytorch"
    mixup: bool = False
    batches: int = 1
    divides: bool = False


@dataclass(frozen=True)
class _Pictures:
    """Tensors of a batch on the meta device."""

    raw: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor
    labels: torch.Tensor
    order: torch.Tensor
    layout: torch.memory_format

    def ready(self, loader: str) -> torch.Tensor:
        """The pictures in FP32 and in the layout of the network."""
        if loader == "pytorch":
            return self.raw.float().sub_(self.mean).div_(self.deviation)
        return self.raw.float().contiguous(memory_format=self.layout)

    def mixed(self, loader: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures and shares of the classes, each mixed with those of another picture."""
        data = self.ready(loader)
        shares = torch.zeros(len(self.labels), CLASSES, device=data.device)
        shares = shares.scatter(1, self.labels.unsqueeze(1), 1.0)
        mixed = _MIXED * data + (1 - _MIXED) * data[self.order, :]
        return mixed, _MIXED * shares + (1 - _MIXED) * shares[self.order, :]


def scripted_workload(
    name: str,
    model: torch.nn.Module,
    side: int,
    batch: int,
    run: ScriptRun,
    *,
    training: bool,
    channels_last: bool,
    mixed_precision: bool,
) -> CapturedWorkload:
    """``run.batches`` batches of ``batch`` pictures of ``side`` pixels, and one step of the optimizer if ``training``;
    else one batch, validated. ``model`` is on the meta device.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    model.train(training)
    pictures = _pictures(batch, side, layout, run)

    def precision() -> AbstractContextManager[None]:
        return torch.autocast("cuda", dtype=torch.float16, enabled=mixed_precision)

    if training:
        return CapturedWorkload(name, model, _training(model, pictures, run, precision, mixed_precision))
    return CapturedWorkload(name, model, _validation(model, pictures, run, precision))


def _pictures(batch: int, side: int, layout: torch.memory_format, run: ScriptRun) -> _Pictures:
    handed = layout if run.loader == "pytorch" else torch.contiguous_format
    with torch.device("meta"):
        return _Pictures(
            torch.empty((batch, 3, side, side), dtype=torch.uint8, memory_format=handed),
            torch.empty((1, 3, 1, 1)),
            torch.empty((1, 3, 1, 1)),
            torch.empty((batch,), dtype=torch.int64),
            torch.empty((batch,), dtype=torch.int64),
            layout,
        )


def _training(
    model: torch.nn.Module,
    pictures: _Pictures,
    run: ScriptRun,
    precision: Callable[[], AbstractContextManager[None]],
    scaled: bool,
) -> Callable[[], None]:
    parameters = list(model.parameters())
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer = _optimizer(model)
    plain = torch.nn.CrossEntropyLoss()

    def batch() -> None:
        data, target = pictures.mixed(run.loader) if run.mixup else (pictures.ready(run.loader), pictures.labels)
        with precision():
            loss = _smoothed_loss(model(data), target) if run.mixup else plain(model(data), target)
            if not run.divides:
                loss /= run.batches
        (loss * _SCALE if scaled else loss).backward()

    def step() -> None:
        for place in range(run.batches):
            batch()
            if place == run.batches - 1:
                gradients = [each.grad for each in parameters if each.grad is not None]
                _finish(gradients, run, scaled)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            torch.cuda.synchronize()

    return step


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, tensor by tensor; norms do not decay."""
    norms = [each for name, each in model.named_parameters() if "bn" in name]
    others = [each for name, each in model.named_parameters() if "bn" not in name]
    groups = [{"params": norms, "weight_decay": 0.0}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1, momentum=_MOMENTUM, weight_decay=_DECAY, foreach=False)


def _finish(gradients: Sequence[torch.Tensor], run: ScriptRun, scaled: bool) -> None:
    if scaled:
        found, inverse = (torch.zeros((), device=gradients[0].device) for _ in range(2))
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    if run.divides:
        for each in gradients:
            each.div_(run.batches)


def _smoothed_loss(scores: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    logs = torch.nn.functional.log_softmax(scores.float(), dim=-1)
    told = (-logs * shares).sum(-1)
    return ((1 - _SMOOTHING) * told + _SMOOTHING * -logs.mean(dim=-1)).mean()


def _validation(
    model: torch.nn.Module,
    pictures: _Pictures,
    run: ScriptRun,
    precision: Callable[[], AbstractContextManager[None]],
) -> Callable[[], None]:
    def step() -> None:
        data = pictures.ready(run.loader)
        with precision():
            scores = model(data)
            torch.nn.functional.cross_entropy(scores, pictures.labels)
            found = scores.topk(5, 1, True, True).indices.t()
            hits = found.eq(pictures.labels.view(1, -1).expand_as(found))
            for most in (1, 5):
                hits[:most].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(pictures.labels))
        torch.cuda.synchronize()

    return step
