"""Built-in workloads by name: a model on the meta device, its optimizer and its step.

The names are in ``IMAGES`` here, in ``CONFIGS`` of :mod:`e2e.capture.models.dlrm` and in ``PRESETS`` of
:mod:`e2e.capture.models.configurations`. Imports ``torch``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.attention import absorb, pack_documents
from e2e.capture.models import dlrm, transformer
from e2e.capture.models.configurations import PRESETS
from e2e.capture.models.image_models import InceptionV3, ResNet50, timm_module
from e2e.capture.models.layer_forms import add_adapters, apply_forms
from e2e.capture.models.stacks import apply_stack, stack_of
from e2e.capture.session import CapturedWorkload
from e2e.step.options import Mode, StepOptions


def adamw(parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """Return the step of AdamW on the parameters themselves, in the form that PyTorch selects on a GPU."""
    return torch.optim.AdamW(parameters, lr=1e-4).step


def mixed_adamw(parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """Return the update of :class:`MixedAdamW`."""
    return MixedAdamW(parameters).update


class MixedAdamW(torch.optim.Optimizer):
    """Optimizer of 16-bit parameters with FP32 master weights, as ``Float16OptimizerWithFloat16Params`` of Megatron-LM.

    Gradients are copied to FP32, for FP16 divided by the loss scale and checked (which the host waits for), AdamW
    updates the master weights, and they are copied back.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.narrow = list(parameters)
        super().__init__(self.narrow, {"lr": 1e-4})
        self.masters = [torch.nn.Parameter(each.detach().to(torch.float32)) for each in self.narrow]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-4)
        self.state = self.inner.state
        self.values = [each.detach() for each in self.narrow]
        self.scaled = self.narrow[0].dtype is torch.float16
        self.found, self.inverse_scale = (torch.zeros(1, device=self.narrow[0].device) for _ in range(2))
        for master in self.masters:
            master.grad = torch.empty_like(master)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run :meth:`update`, with the hooks of optimizers."""
        self.update()

    def update(self) -> None:
        """Run one step on the parameters with gradients."""
        there = [place for place, each in enumerate(self.narrow) if each.grad is not None]
        gradients = [self.narrow[place].grad.to(torch.float32) for place in there]  # type: ignore[union-attr]
        if self.scaled:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, self.inverse_scale)
            self.found.item()
        for master in self.masters:
            master.grad = None
        for place, gradient in zip(there, gradients, strict=True):
            self.masters[place].grad = gradient
        self.inner.step()
        torch._foreach_copy_(self.values, [each.detach() for each in self.masters])


IMAGES: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "resnet-50": (ResNet50, 224),
    "inception-v3": (InceptionV3, 299),
}
# Names in other libraries.
ALIASES = {"resnet50": "resnet-50", "inception_v3": "inception-v3"}
TIMM = "timm/"
# `dlrm-random-<tables>` or `dlrm-random-<tables>-<seed>`.
RANDOM_DLRM = re.compile(r"dlrm-random-(\d+)(?:-(\d+))?$")
AUXILIARY_WEIGHT = 0.4
TORCH_DTYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def known_models() -> tuple[str, ...]:
    """Return the names for :func:`build`.

    It also accepts ``dlrm-random-<tables>[-<seed>]``, and ``timm/NAME`` for image models of that library if it is
    installed.
    """
    return tuple(sorted((*IMAGES, *dlrm.CONFIGS, *PRESETS)))


def unknown_model(name: str, known: Sequence[str]) -> InputError:
    """Return the error for a ``name`` that is not in ``known``, with the nearest names and all names."""
    near = difflib.get_close_matches(name.lower(), known, 3)
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return InputError(
        f"model {name!r} is not known; {nearest}give --model-config, --script, or one of {', '.join(known)}"
    )


def build(
    name: str, batch_size: int, sequence_length: int | None = None, options: StepOptions | None = None
) -> CapturedWorkload:
    """Build the workload ``name``; raise ``InputError`` for an unknown name (offering the nearest) or impossible
    sizes.
    """
    options = options or StepOptions()
    _check_sizes(batch_size, sequence_length)
    name = ALIASES.get(name, name)
    if sequence_length is not None and (name in IMAGES or name.startswith(("dlrm", TIMM))):
        raise InputError(f"model {name!r} has no sequences; leave the sequence length out")
    if name not in known_models() and not RANDOM_DLRM.match(name) and not name.startswith(TIMM):
        raise unknown_model(name, known_models())
    if options.stack is not None and name not in PRESETS:
        raise InputError(f"--stack {options.stack}: is for transformers; leave it out for model {name!r}")
    if options.lora is not None and name not in PRESETS:
        raise InputError(f"--lora {options.lora}: is for transformers; leave it out for model {name!r}")
    if options.document_length is not None and name not in PRESETS:
        raise InputError(f"--document-length is for transformers; leave it out for model {name!r}")
    if options.cache_length is not None and name not in PRESETS:
        raise InputError(f"--cache-length is for transformers; leave it out for model {name!r}")
    if name in IMAGES:
        make, side = IMAGES[name]
        with torch.device("meta"):
            module = make()
        return images_workload(name, module, side, batch_size, options)
    if name.startswith(TIMM):
        module, side = timm_module(name.removeprefix(TIMM), fused_attention=options.form not in ("eager", "math"))
        return images_workload(name, module, side, batch_size, options)
    matched = RANDOM_DLRM.match(name)
    if name in dlrm.CONFIGS or matched:
        config = dlrm.CONFIGS.get(name)
        if matched:
            config = dlrm.random_tables(max(int(matched[1]), 1), int(matched[2] or 0))
        assert config is not None
        return build_dlrm(config, batch_size, options, name)
    return build_from_config(PRESETS[name], batch_size, sequence_length, options, name)


def build_from_file(
    path: Path, batch_size: int, sequence_length: int | None = None, options: StepOptions | None = None
) -> CapturedWorkload:
    """Build the workload of a Hugging Face configuration file."""
    config = transformer.read_config(path)
    _check_sizes(batch_size, sequence_length)
    return build_from_config(config, batch_size, sequence_length, options or StepOptions(), str(path))


def build_from_config(
    config: Any, batch_size: int, sequence_length: int | None, options: StepOptions, source: str
) -> CapturedWorkload:
    """Build a transformer from its configuration. Training uses AdamW on the library's own loss."""
    attention = transformer.library_form(options.form)
    model = transformer.build_transformer(config, attention, source)
    length, cached = sequence_length or 1, options.cache_length
    if cached is None:
        length = transformer.sequence_length(model.config.to_dict(), sequence_length, source)
    else:
        transformer.sequence_length(model.config.to_dict(), cached + length, source)
    if options.document_length is not None:
        pack_documents(model, attention, options.document_length, source)
    stack = stack_of(options.stack)
    apply_stack(model, replace(stack, loss="plain") if options.mode == "inference" else stack, source)
    apply_forms(model, config, options, source)
    if options.lora is not None:
        add_adapters(model, options.lora, source)
    if options.attention == "mla":
        absorb(model, cached, source)
    _prepare(model, options)
    kept_as = torch.float8_e4m3fn if options.attention == "flash3-fp8" else None
    with_loss = options.mode != "inference"
    forward = transformer.forward_call(
        model, batch_size, length, with_loss, source, cached=options.cache_length, kept_as=kept_as
    )
    narrow = options.master_weights and options.dtype in ("bfloat16", "float16")
    make: MakeOptimizer = MixedAdamW if narrow else partial(torch.optim.AdamW, lr=1e-4)
    found = workload(source, model, forward, options, make)
    return replace(found, samples=batch_size, sequence_length=length, optimizer="AdamW" if found.optimizer else "")


def build_dlrm(config: dlrm.DlrmConfig, batch_size: int, options: StepOptions, name: str = "dlrm") -> CapturedWorkload:
    """Build DLRM with plain SGD; the rows of batched tables are updated in the backward pass."""
    with torch.device("meta"):
        model = dlrm.Dlrm(config)
    _prepare(model, options)
    tables, lookups = len(config.rows), config.lookups
    with torch.device("meta"):
        dense = torch.empty((batch_size, config.bottom[0]), dtype=TORCH_DTYPES[options.dtype])
        indices = torch.empty((tables, batch_size * lookups), dtype=torch.int64)
        offsets = torch.empty((batch_size,), dtype=torch.int64)
        clicks = torch.empty((batch_size, 1), dtype=TORCH_DTYPES[options.dtype])
    criterion = torch.nn.MSELoss() if config.loss == "mse" else torch.nn.BCELoss()

    def forward() -> torch.Tensor:
        probabilities = model(dense, indices, offsets)
        return probabilities if options.mode == "inference" else criterion(probabilities, clicks)

    found = workload(name, model, forward, options, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    return replace(found, samples=batch_size)


def workload(
    name: str,
    model: torch.nn.Module,
    forward: Callable[[], torch.Tensor],
    options: StepOptions,
    make_optimizer: MakeOptimizer,
) -> CapturedWorkload:
    """Return the step of ``options.mode`` with ``forward``, which returns the loss (in inference, any result)."""
    if options.mode == "inference":
        return CapturedWorkload(name, model, forward)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = make_optimizer(trained) if options.mode == "train" else None

    def step() -> None:
        for each in trained:  # as optimizers do; ``Module.zero_grad`` walks over all modules
            each.grad = None
        forward().backward()
        if optimizer is not None:
            optimizer.step()

    return CapturedWorkload(name, model, step, optimizer="" if optimizer is None else type(optimizer).__name__)


def images_workload(
    name: str,
    model: torch.nn.Module,
    side: int,
    batch_size: int,
    options: StepOptions,
    autocast: torch.dtype | None = None,
) -> CapturedWorkload:
    """Return the workload of an image classifier (N, 3, ``side``, ``side``): cross entropy, SGD with momentum.

    ``autocast``: type of ``torch.autocast`` in the forward pass, without a loss scaler.
    """
    _prepare(model, options)
    layout = torch.channels_last if options.layout == "channels-last" else torch.contiguous_format
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    with torch.device("meta"):
        pictures = torch.empty((batch_size, 3, side, side), dtype=TORCH_DTYPES[options.dtype], memory_format=layout)
        labels = torch.empty((batch_size,), dtype=torch.int64)
    plain = classification(model, pictures, labels, options.mode)

    def forward() -> torch.Tensor:
        with torch.autocast("cuda", dtype=autocast or torch.float16, enabled=autocast is not None):
            return plain()

    found = workload(name, model, forward, options, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    return replace(found, samples=batch_size)


def classification(
    model: torch.nn.Module, pictures: torch.Tensor, labels: torch.Tensor, mode: Mode
) -> Callable[[], torch.Tensor]:
    """Return the forward pass of a classifier: scores for inference, otherwise the loss, including its auxiliary
    head's.
    """
    criterion = torch.nn.CrossEntropyLoss()

    def forward() -> torch.Tensor:
        output = model(pictures)
        scores, auxiliary = output if isinstance(output, tuple) else (output, None)
        if mode == "inference":
            return scores
        loss = criterion(scores, labels)
        return loss if auxiliary is None else loss + AUXILIARY_WEIGHT * criterion(auxiliary, labels)

    return forward


def _prepare(model: torch.nn.Module, options: StepOptions) -> None:
    eight = {name: each for name, each in model.named_parameters() if each.itemsize == 1}
    model.to(TORCH_DTYPES[options.dtype])
    for name, weight in eight.items():  # weights stored in 8 bits are not cast
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], weight)
    model.train(options.mode != "inference")


def _check_sizes(batch_size: int, sequence_length: int | None) -> None:
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} must be at least 1")
    if sequence_length is not None and sequence_length < 1:
        raise InputError(f"sequence length {sequence_length} must be at least 1")
