"""Interface of a model: its named inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorInfo:
    """One named input or output of the model. ``shape`` is static; ``dtype`` is NumPy's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
