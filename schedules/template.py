"""What a kernel template is: the contract between templates, tuner and lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from schedules.target import CpuTarget

if TYPE_CHECKING:
    from tvm import tirx

Config = Mapping[str, int]

# Part of the key of every record. To be raised with any change of a template that makes other code of a configuration.
TEMPLATE_REVISION = 4


@dataclass(frozen=True)
class TensorSpec:
    """Shape and layout of one kernel argument; ``blocked`` is ``(N, ceil(C/V), H, W, V)``."""

    shape: tuple[int, ...]
    layout: Literal["plain", "blocked"] = "plain"
    dtype: str = "float32"


@dataclass(frozen=True)
class Signature:
    """Arguments of a kernel, in the order data, constants, residual (if any), output."""

    data: TensorSpec
    constants: tuple[TensorSpec, ...]
    residual: TensorSpec | None
    output: TensorSpec

    @property
    def arguments(self) -> tuple[TensorSpec, ...]:
        residual = () if self.residual is None else (self.residual,)
        return (self.data, *self.constants, *residual, self.output)


@dataclass(frozen=True, eq=False)
class Parameters:
    """Weights of one layer in the framework's layout (OIHW, or (out, in)); ``bias`` is (out,)."""

    weight: np.ndarray
    bias: np.ndarray | None = None


class Template(Protocol):
    """A family of kernels for one kind of operator."""

    family: str

    def signature(self, operator: Any, cpu: CpuTarget) -> Signature:
        """Shapes and layouts of the arguments."""
        ...

    def space(self, operator: Any, cpu: CpuTarget) -> Sequence[Config]:
        """All legal configurations after pruning, in a deterministic order; never empty."""
        ...

    def build(self, operator: Any, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        """The kernel of one configuration, with the parameters of :meth:`signature`."""
        ...

    def pack(self, operator: Any, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        """The constants of :meth:`signature` from the framework's weights."""
        ...
