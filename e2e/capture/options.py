"""What a capture assumes about the step and about the GPU that would run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from costmodel.base.errors import InputError
from e2e.step.choices import AttentionForm, Dtype, Mode

OptimizerForm = Literal["foreach", "fused"]


@dataclass(frozen=True)
class CaptureOptions:
    """``mode``: with optimizer step, without it, or the forward pass alone in evaluation mode.

    ``dtype``: ``tf32`` keeps float32 tensors whose matrix products run on TF32 units; ``bfloat16`` and ``float16``
    cast the whole built-in model (no autocast, no loss scaling: a script that wants those says so itself).
    ``attention``: ``eager`` is products and softmax apart; ``flash`` is the fused kernel that CUDA would choose (flash
    for 16-bit types without a mask, memory-efficient otherwise).
    ``optimizer``: the form of an optimizer that leaves the choice open (``foreach=None, fused=None``).
    ``stack``: a name of :data:`e2e.capture.models.stacks.STACKS`, whose kernels a built-in transformer has (``None``:
    the library's). ``lora``: the rank of adapters, the weights themselves are frozen (``None``: all are trained).
    """

    mode: Mode = "train"
    dtype: Dtype = "float32"
    attention: AttentionForm = "eager"
    optimizer: OptimizerForm = "foreach"
    stack: str | None = None
    lora: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("mode", Mode),
            ("dtype", Dtype),
            ("attention", AttentionForm),
            ("optimizer", OptimizerForm),
        ):
            if getattr(self, name) not in get_args(allowed):
                known = ", ".join(get_args(allowed))
                raise InputError(f"{name} {getattr(self, name)!r} is not known; choose one of {known}")
