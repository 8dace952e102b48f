"""What a capture assumes about the step and about the GPU that would run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from costmodel.base.errors import InputError
from e2e.step.choices import (
    AttentionForm,
    Dtype,
    LinearAttentionForm,
    MemoryLayout,
    MixtureForm,
    Mode,
    OptimizerForm,
)
from e2e.step.precision import Precision

if TYPE_CHECKING:  # counting pairs needs NumPy, which command lines start without
    from costmodel.operators.attention import AttentionKernel


@dataclass(frozen=True)
class SeenGpu:
    """What ``torch.cuda`` tells a script of the GPU: its name, compute capability, bytes of memory and multiprocessors.
    The default is an A100, for captures that are priced on several machines."""

    name: str = "NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    memory_bytes: int = 80 << 30
    multiprocessors: int = 108
    l2_bytes: int = 40 << 20


@dataclass(frozen=True)
class CaptureOptions:
    """``mode``: with optimizer step, without it, or the forward pass alone in evaluation mode.

    ``dtype``: ``tf32`` keeps float32 tensors whose matrix products run on TF32 units; ``bfloat16`` and ``float16``
    cast the whole built-in model (no autocast, no loss scaling: a script that wants those says so itself).
    ``attention``: ``eager`` and ``math`` are products and softmax apart; ``flash`` is the fused kernel that the GPU and
    PyTorch would choose when it is priced, the others are fused kernels by name.
    ``optimizer``: the form of an optimizer that leaves the choice open (``foreach=None, fused=None``).
    ``stack``: a name of :data:`e2e.capture.models.stacks.STACKS`, whose kernels a built-in transformer has (``None``:
    the library's). ``lora``: the rank of adapters, the weights themselves are frozen (``None``: all are trained).
    ``layout``: of a built-in image model and its pictures. ``mixture``: how the experts of built-in models are
    computed; ``precision``: recipe by which their linear layers are trained in 8 bits; ``weights_arrive``: their
    weights come to the layers in 8 bits; ``document_length``: tokens of each document of which sequences are packed
    (``None``: a sequence is one). ``cache_length``: tokens of each sequence whose keys and values are there already,
    for a forward pass alone (``None``: no cache is kept). ``linear_attention``: whether the layers of Mamba and gated
    delta rules run by their libraries' fused kernels (``None``: where these are installed). ``bucket_mb``: MiB of a
    bucket of gradients, whatever a script gives to DDP (``None``: as it says). ``master_weights``: AdamW of a built-in
    transformer of 16 bits updates FP32 weights beside it. ``gpu``: what a script finds.
    """

    mode: Mode = "train"
    dtype: Dtype = "float32"
    attention: AttentionForm = "eager"
    optimizer: OptimizerForm = "foreach"
    stack: str | None = None
    lora: int | None = None
    layout: MemoryLayout = "contiguous"
    mixture: MixtureForm = "grouped"
    precision: Precision | None = None
    weights_arrive: bool = False
    document_length: int | None = None
    cache_length: int | None = None
    linear_attention: LinearAttentionForm | None = None
    bucket_mb: float | None = None
    master_weights: bool = False
    gpu: SeenGpu = SeenGpu()

    @property
    def kernel(self) -> AttentionKernel:
        """The kernel of fused attention, as the cost models name it."""
        return "sdpa" if self.attention == "eager" or self.attention == "flash" else self.attention

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", Mode),
            ("dtype", Dtype),
            ("attention", AttentionForm),
            ("optimizer", OptimizerForm),
            ("layout", MemoryLayout),
            ("mixture", MixtureForm),
        ):
            if getattr(self, name) not in get_args(allowed):
                known = ", ".join(get_args(allowed))
                raise InputError(f"{name} {getattr(self, name)!r} is not known; choose one of {known}")
        if self.linear_attention not in (None, *get_args(LinearAttentionForm)):
            known = ", ".join(get_args(LinearAttentionForm))
            raise InputError(f"linear attention {self.linear_attention!r} is not known; choose one of {known}")
