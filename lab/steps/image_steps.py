"""Measured steps of image models as requests to ``predict``: timm's results, and NVIDIA's classifiers by their script.

**timm**: every row of the results can be selected; by default a spread of them is taken, one model of each family
(module of timm) per file. Families are split by name into fitted and held-out ones; of the fitted ones only steps on
:data:`FITTED_MACHINE` are used, so that the other card is held out altogether.

``python -m lab.steps.image_steps -o FILE`` captures the steps that factors are fitted on and counts their kernels, with
which ``python -m lab.fit`` inverts whole steps; calibration/vision/steps.json.gz is its result, since capturing needs
timm and PyTorch, which the fit does without. With ``--held-out N`` it draws steps that no factor is fitted on instead,
and writes their measured times beside them: what ``python -m costmodel fit --steps`` takes, and what a test watches
(tests/lab/validate/vision_sample.json.gz: ``--held-out 12``).

**NVIDIA**: DeepLearningExamples, PyTorch/Classification/ConvNets (BSD-3), ``main.py`` and
``image_classification/{training,dataloaders,mixup}.py`` at 097c7ff9 and 46ff3707. Beside the network a step there

* makes pictures of bytes: PyTorch's loader hands over bytes in the network's layout, which three kernels turn into FP32
  (``PrefetchedWrapper``; on a stream of their own, but they need the same memory: in turn here); DALI's
  ``CropMirrorNormalize`` is one kernel, whose NCHW is then copied into the layout. JPEG is decoded by the CPU in both;
* mixes every picture with another one, and its label with that one's (``mixup``), where ``configs.yml`` says so;
* adds up the gradients of several batches before the optimizer runs (``optimizer_batch_size``), which fill zeros
  instead of taking the place of nothing (PyTorch before 2.0); the optimizer runs tensor by tensor, as there was no
  other form of it;
* scales the loss, and unscales the gradients, where precision is mixed;
* waits for the GPU after every batch, so that the next one's first kernels wait for the host.

Validation adds the loss and the two accuracies. What is left out: labels and loss as they travel, logging (outside
the time that is measured).

Where the figures are from: ``resnet50v1.5/README.md`` at 291f0d02 and ``se-resnext101-32x4d/README.md`` at 0107cf27
(NGC container 21.03; training of one GPU, inference on V100 and T4), ``resnext101-32x4d/README.md`` at 46ff3707 (20.06,
training), batch sizes and layouts by ``configs.yml`` at 097c7ff9: NHWC with mixed precision, NCHW otherwise. A step is
run as the script runs it: by ``launch.py`` and ``configs.yml`` (PyTorch's loader, mixup, gradients of some 1,000 or
2,000 pictures added up), ResNeXt by the command of its page (DALI on the CPU, none of these). No factor is fitted on
any of them. ResNeXt's inference is left out: its table of T4 has 449 pictures a second in FP32, 89 % of the datasheet's
arithmetic (8.1 TFLOP/s), where the card reaches half of that and SE-ResNeXt 171.

Figures are averages over 100 iterations, the first of which tries the algorithms of convolutions
(``cudnn.benchmark``). It moves the mean of the latencies of 21.03 above their own 95th percentile (84 ms, 75 ms; 256
pictures on V100), but the mean of the throughputs by a hundredth: it is these that are taken.
"""

from __future__ import annotations

import gc
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from costmodel.base.errors import ModelError, ProjectError
from costmodel.gpu.own_gpu import CountedStep, write_inventory
from e2e.capture.models.catalog import IMAGES
from e2e.capture.models.image_models import timm_library, timm_module
from e2e.capture.session import CapturedWorkload
from e2e.sources.requests import Script
from e2e.sources.user_script import prepare
from e2e.step.execution_graph import operator_counts
from lab.command_line import program, run
from lab.data.data_folder import data_folder
from lab.data.timm_steps import INVENTORY, TimmStep, read_timm, timm_files

_Precision = Callable[[], AbstractContextManager[Any]]
FITTED_MACHINE = "rtx-3090"
# PyTorch 1.12 has no scaled_dot_product_attention; timm's attention was products and softmax then.
_FUSED_ATTENTION_FROM, _FP32_ATTENTION_FROM = 200, 250
# timm's norms in the type of autocast (``--fast-norm``): its inference results cannot have been without it. It is read
# off the labels: of models on timm's own norms (ConvNeXt, BiT) what is measured leaves no time for norms and casts in
# FP32, +33 % and +82 %, while vision transformers, on PyTorch's LayerNorm in timm of that year, are +1 % with them.
# Training results (2022) are older.
_PLAIN_NORMS, _TIMM_NORMS_FROM = ("vision_transformer", "deit", "vision_transformer_hybrid"), 291
# LSTMs over rows and columns run as thousands of steps without cuDNN.
_NOT_CAPTURED = ("sequencer",)
# timm's own table of old names maps the wide variants of these to ones 8 channels wide.
_RENAMED = {f"ig_resnext101_32x{width}d": f"resnext101_32x{width}d" for width in (16, 32)}
# A model whose parameter count differs by more than this is another one than the measured one.
_PARAMETERS_WITHIN = 0.01
_LEAST_MODELS = 4  # models of a family in a file needed for the spread


def family_of(model: str) -> str:
    """Module of timm that defines ``model``, such as ``efficientnet``; empty for one it no longer has."""
    entry = timm_library().models._registry._model_to_module
    return str(entry.get(model.partition(".")[0], ""))


def is_held_out(family: str) -> bool:
    """True if no row of ``family`` is fitted on: about half of the families, by a checksum of their names."""
    return zlib.crc32(family.encode()) % 100 < 50


def fitted_on(step: TimmStep) -> bool:
    """True if factors may be fitted on ``step``: eager, on the fitted card, of a family that is not held out."""
    return step.machine == FITTED_MACHINE and not step.compiled and not is_held_out(family_of(step.model))


def all_steps(data: Path) -> list[TimmStep]:
    """All measured steps in ``data`` whose model timm still has, and that can be captured."""
    out = ("", *_NOT_CAPTURED)
    return [step for path in timm_files(data) for step in read_timm(path) if family_of(step.model) not in out]


def middle_steps(steps: Iterable[TimmStep]) -> list[TimmStep]:
    """The step with the median time of each file and each larger family."""
    groups: dict[tuple[str, str, int, str], list[TimmStep]] = {}
    for step in steps:
        groups.setdefault((step.machine, step.group, step.version, family_of(step.model)), []).append(step)
    large = [sorted(each, key=lambda step: step.seconds) for each in groups.values() if len(each) >= _LEAST_MODELS]
    return [each[len(each) // 2] for each in large]


def chosen(steps: Sequence[TimmStep], only: str) -> list[TimmStep]:
    """Steps whose name contains ``only``; the spread for an empty text."""
    return [step for step in steps if only in step.name] if only else middle_steps(steps)


def _has_plain_norm(step: TimmStep) -> bool:
    """True if the norms of the model were PyTorch's own, which ``--fast-norm`` leaves in FP32, in timm of 2024."""
    return step.version < _TIMM_NORMS_FROM and family_of(step.model) in _PLAIN_NORMS


@contextmanager
def _unfused_attention_of(version: int) -> Iterator[None]:
    """Select the dtype of attention without a fused kernel (five dimensions, as in NesT and Twins): FP32 from PyTorch
    2.5 on (``allow_fp16_bf16_reduction_math_sdp``), before that the type of its operands.
    """
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(version < _FP32_ATTENTION_FROM)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _check_same_model(step: TimmStep, module: torch.nn.Module) -> None:
    """Compare the number of parameters with the table's, given in millions with two digits; ``ModelError`` if it
    differs.
    """
    here = sum(each.numel() for each in module.parameters())
    if step.parameters and abs(here - step.parameters) > _PARAMETERS_WITHIN * step.parameters + 1e4:
        raise ModelError(
            f"{step.model}: {here / 1e6:.2f} million parameters in this timm, "
            f"{step.parameters / 1e6:.2f} where it was measured; install the timm that the row is of"
        )


def timm_request(step: TimmStep) -> Script:
    """Request for ``step``, with timm's ``benchmark.py`` as the script."""
    return Script(script=partial(_benchmark, step), compile=step.compiled, gpu=step.machine)


def _benchmark(step: TimmStep) -> tuple[torch.nn.Module, Callable[[], None]]:
    """Model and step as run by ``benchmark.py``.

    ``ModelError`` if the installed timm builds another model of that name than the measured one.
    """
    fused, fast = step.version >= _FUSED_ATTENTION_FROM, not step.training
    slow = {"norm_layer": partial(torch.nn.LayerNorm, eps=1e-6)} if fast and _has_plain_norm(step) else {}
    name = _RENAMED.get(step.architecture, step.architecture)
    module, side = timm_module(name, step.side, fused_attention=fused, fast_norm=fast, **slow)
    _check_same_model(step, module)
    layout = torch.channels_last if step.channels_last else torch.contiguous_format
    module = module.to("cuda", memory_format=layout)  # type: ignore[call-overload]
    module.train(step.training)
    pictures = torch.randn(step.batch, 3, side, side, device="cuda").contiguous(memory_format=layout)
    torch.backends.cuda.matmul.allow_tf32 = True
    precision = partial(torch.autocast, device_type=pictures.device.type, dtype=torch.float16)
    run = _timm_training(module, pictures, precision) if step.training else _timm_inference(module, pictures, precision)

    def timed() -> None:
        with _unfused_attention_of(step.version):
            run()

    return module, timed


def _timm_training(module: torch.nn.Module, pictures: torch.Tensor, precision: _Precision) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss().to(pictures.device)
    labels = torch.empty(len(pictures), device=pictures.device, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        with precision():
            loss = criterion(module(pictures), labels)
        loss.backward()
        optimizer.step()

    return step


def _timm_inference(module: torch.nn.Module, pictures: torch.Tensor, precision: _Precision) -> Callable[[], None]:
    @torch.inference_mode()
    def step() -> None:
        with precision():
            module(pictures)

    return step


CLASSES = 1000
_MIXED, _SMOOTHING, _MOMENTUM, _DECAY, _SCALE = 0.2, 0.1, 0.875, 3e-5, 128.0


@dataclass(frozen=True)
class ScriptRun:
    """Options of the script."""

    # Loader of the pictures.
    loader: Literal["pytorch", "dali-cpu"] = "pytorch"
    # Pictures and labels are mixed, labels smoothed.
    mixup: bool = False
    # Batches per step of the optimizer.
    batches: int = 1
    # Gradients are divided by the number of batches, in a kernel each (46ff3707), instead of the loss.
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
        """Pictures in FP32 and in the layout of the network."""
        if loader == "pytorch":
            return self.raw.float().sub_(self.mean).div_(self.deviation)
        return self.raw.float().contiguous(memory_format=self.layout)

    def mixed(self, loader: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Pictures and class shares, each mixed with those of another picture."""
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
    """Workload of ``run.batches`` batches of ``batch`` pictures of ``side`` pixels and one step of the optimizer if
    ``training``; else of one validated batch. ``model`` is on the meta device.
    """
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    model.train(training)
    pictures = _pictures(batch, side, layout, run)

    def precision() -> AbstractContextManager[None]:
        return torch.autocast("cuda", dtype=torch.float16, enabled=mixed_precision)

    if training:
        return CapturedWorkload(name, model, _scripted_training(model, pictures, run, precision, mixed_precision))
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


def _scripted_training(
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
    """SGD with momentum, tensor by tensor; norms have no weight decay."""
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


Precision = Literal["tf32", "amp", "float32"]


@dataclass(frozen=True)
class PublishedStep:
    """One published throughput, as seconds of a step: ``run.batches`` batches of ``batch`` pictures in training."""

    model: str
    machine: str
    training: bool
    precision: Precision
    batch: int
    images_per_second: float
    run: ScriptRun

    @property
    def seconds(self) -> float:
        """Seconds of one step of the optimizer, or of one validated batch."""
        return self.run.batches * self.batch / self.images_per_second

    @property
    def compiled(self) -> bool:
        """False for all of these steps."""
        return False

    @property
    def channels_last(self) -> bool:
        """Memory layout according to ``configs.yml``."""
        return self.precision == "amp"

    @property
    def group(self) -> str:
        """Mode, layout and dtypes."""
        mode, layout = "train" if self.training else "infer", "nhwc" if self.channels_last else "nchw"
        return f"{mode}-{layout}-{self.precision}"

    @property
    def version(self) -> int:
        """PyTorch version of the container, 1.8 (of 20.06: 1.6)."""
        return 18

    @property
    def name(self) -> str:
        """Card, group, model and batch."""
        return f"{self.machine}/{self.group}-nvidia/{self.model}-{self.batch}"


_RESNET, _RESNEXT, _SE_RESNEXT = "resnet-50", "resnext101_32x4d", "seresnext101_32x4d"
_A100, _A100_40, _V100 = "a100-sxm-80gb", "a100-sxm-40gb", "v100-sxm2-16gb"
# Options of the command on its page.
_BY_PAGE = ScriptRun("dali-cpu", divides=True)


def _trained(
    machine: str, precision: Precision, batch: int, rate: float, model: str = _RESNET, optimizer_batch: int = 2048
) -> PublishedStep:
    """Training step by ``launch.py``; ``optimizer_batch``: pictures per optimizer step (``resnet_params_2k`` and
    others).
    """
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
    """Request for ``step``, with NVIDIA's script."""
    return Script(script=partial(_scripted, step), gpu=step.machine)


def _scripted(step: PublishedStep) -> tuple[torch.nn.Module, Callable[[], object]]:
    """Model and step; ResNet-50 is built in, others are timm's."""
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


# --- counts of their kernels -----------------------------------------------------------------------
MODELS_OF_A_FAMILY, TRAINED_MODELS = 2, 8
_EVERY = 25  # number of steps after which intermediate results are written


def inventory_steps(
    steps: Iterable[TimmStep], most: int = MODELS_OF_A_FAMILY, training: int = TRAINED_MODELS
) -> list[TimmStep]:
    """From each family, ``most`` models with all of their steps, and training steps of ``training`` models, which cover
    more classes of kernels; both spread evenly by time.
    """
    by_family: dict[str, list[TimmStep]] = {}
    for step in sorted(steps, key=lambda step: (not step.training, step.channels_last, step.seconds / step.batch)):
        by_family.setdefault(family_of(step.model), []).append(step)
    found: list[TimmStep] = []
    for _, members in sorted(by_family.items(), key=lambda item: zlib.crc32(item[0].encode())):
        kept = _spread_models(members, most)
        trained = _spread_models([step for step in members if step.training], training)
        found += [s for s in members if s.architecture in kept or (s.training and s.architecture in trained)]
    return found


def _spread_models(steps: Sequence[TimmStep], most: int) -> set[str]:
    models = list(dict.fromkeys(step.architecture for step in steps))
    return {models[round(place * (len(models) - 1) / max(most - 1, 1))] for place in range(min(most, len(models)))}


def drawn(steps: Iterable[TimmStep], count: int, machine: str = "", seed: int = 0) -> list[TimmStep]:
    """Draw ``count`` random ones of ``steps`` on which no factor is fitted, of different models, on ``machine``
    or any.
    """
    held_out = [step for step in steps if not fitted_on(step) and machine in ("", step.machine)]
    order = random.Random(seed).sample(sorted(held_out, key=lambda step: step.name), len(held_out))
    first: dict[str, TimmStep] = {}
    for step in order:
        first.setdefault(step.architecture, step)
    return list(first.values())[:count]


def inventory_command(
    data: Annotated[Path | None, typer.Option(help="Folder of the measurements.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = INVENTORY,
    held_out: Annotated[int, typer.Option(help="Instead: so many random steps that are held out.")] = 0,
    machine: Annotated[str, typer.Option(help="With --held-out: of this GPU alone.")] = "",
    seed: Annotated[int, typer.Option(help="With --held-out: of the draw.")] = 0,
) -> None:
    """Capture the steps that factors are fitted on, or held-out ones, and write their kernels."""
    every = all_steps(data_folder(data))
    if held_out:
        steps = drawn(every, held_out, machine, seed)
    else:
        steps = inventory_steps(step for step in every if fitted_on(step))
    found: list[CountedStep] = []
    gc.disable()  # captured models refer to themselves: they are collected below
    for count, step in enumerate(steps, 1):
        try:
            kernels = operator_counts(prepare(timm_request(step)).graph)
            found.append(CountedStep(step.name, family_of(step.model), kernels, step.seconds if held_out else 0.0))
        except (ProjectError, RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as reason:
            print(f"left out: {step.name}: {reason}".splitlines()[0], file=sys.stderr, flush=True)
        if count % _EVERY == 0:
            gc.collect()
            write_inventory(found, output)
            print(f"{count} of {len(steps)}", file=sys.stderr, flush=True)
    write_inventory(found, output)


if __name__ == "__main__":
    sys.exit(run(program(inventory_command), "lab.steps.image_steps"))
