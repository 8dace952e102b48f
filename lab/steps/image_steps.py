"""Measured image models, and their steps to predict.

Every row of timm's results can be selected; by default a spread of them is taken, one model of each family (module of
timm) per file. Families are split by name into fitted and held-out ones; of the fitted ones only steps on
:data:`FITTED_MACHINE` are used, so that the other card is held out altogether.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from costmodel.base.errors import ModelError
from e2e.capture.models.image_models import timm_library, timm_module
from e2e.sources.known_requests import Script
from lab.data.timm_steps import TimmStep, read_timm, timm_files

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


def spread(steps: Iterable[TimmStep]) -> list[TimmStep]:
    """The step with the median time of each file and each larger family."""
    groups: dict[tuple[str, str, int, str], list[TimmStep]] = {}
    for step in steps:
        groups.setdefault((step.machine, step.group, step.version, family_of(step.model)), []).append(step)
    large = [sorted(each, key=lambda step: step.seconds) for each in groups.values() if len(each) >= _LEAST_MODELS]
    return [each[len(each) // 2] for each in large]


def chosen(steps: Sequence[TimmStep], only: str) -> list[TimmStep]:
    """Steps whose name contains ``only``; the spread for an empty text."""
    return [step for step in steps if only in step.name] if only else spread(steps)


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
    run = _training(module, pictures, precision) if step.training else _inference(module, pictures, precision)

    def timed() -> None:
        with _unfused_attention_of(step.version):
            run()

    return module, timed


def _training(module: torch.nn.Module, pictures: torch.Tensor, precision: _Precision) -> Callable[[], None]:
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


def _inference(module: torch.nn.Module, pictures: torch.Tensor, precision: _Precision) -> Callable[[], None]:
    @torch.inference_mode()
    def step() -> None:
        with precision():
            module(pictures)

    return step
