"""What several commands let a user choose from."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """What one step does."""

    train = "train"
    forward_backward = "forward-backward"
    inference = "inference"


class Dtype(StrEnum):
    """Number type of the model."""

    float32 = "float32"
    tf32 = "tf32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class AttentionForm(StrEnum):
    """How attention is computed."""

    eager = "eager"
    flash = "flash"
