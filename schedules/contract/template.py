"""What a kernel template is: the contract between templates, tuner and lowering.

A template is one file (its signature, its knobs and their legal values, its analytic cost, its kernel) and one line in
:mod:`schedules.kernels.template_table`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from costmodel.model.measurements import Config as Config  # knob -> value
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget

if TYPE_CHECKING:
    from tvm import tirx

# Part of the key of every record. To be raised with any change of a template that makes other code of a configuration;
# the second where it does so of values narrower than float32 alone.
TEMPLATE_REVISION = 5
NARROW_REVISION = 1


def template_revision(dtype: str = "float32") -> str:
    """Of the kernels of operators of ``dtype``."""
    return str(TEMPLATE_REVISION) if dtype == "float32" else f"{TEMPLATE_REVISION}.{NARROW_REVISION}"


# The one knob that is known outside of a template: into how many parts its parallel tasks divide the output channels.
CHANNEL_TASKS = "channel_tasks"
# By what the threads share the output of a kernel.
WorkSplit = Literal["channels", "pixels", "both"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, layout and dtype of one kernel argument; ``blocked`` is ``(N, ceil(C/V), H, W, V)``.

    That of a quantised layer (``int8``) holds bytes without a sign: ``uint8``.
    """

    shape: tuple[int, ...]
    layout: Literal["plain", "blocked"] = "plain"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", tensor_dtype(self.dtype))

    @property
    def size_bytes(self) -> int:
        """Memory of it."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def tensor_dtype(dtype: str) -> str:
    """Of the tensors of an operator of ``dtype``."""
    return "uint8" if dtype == "int8" else dtype


def numpy_dtype(name: str) -> np.dtype:
    """NumPy's dtype of this name, or that of ``ml_dtypes`` for those that NumPy alone lacks (``bfloat16``)."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Signature:
    """Arguments of a kernel, in the order data, gate (if any), constants, residual (if any), output."""

    data: TensorSpec
    constants: tuple[TensorSpec, ...]
    residual: TensorSpec | None
    output: TensorSpec
    gate: TensorSpec | None = None

    @property
    def arguments(self) -> tuple[TensorSpec, ...]:
        """All tensors of the kernel in the order in which it takes them."""
        gate = () if self.gate is None else (self.gate,)
        residual = () if self.residual is None else (self.residual,)
        return (self.data, *gate, *self.constants, *residual, self.output)


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """``array`` as tensors of kernels of ``dtype`` hold it: whole numbers of 8 bits become bytes, signed or not."""
    if dtype in ("int8", "uint8"):
        return np.ascontiguousarray(array).astype(np.int16).astype(np.uint8)  # modulo 256: the bits of a signed byte
    return np.ascontiguousarray(array, dtype=numpy_dtype(dtype))


@dataclass(frozen=True)
class QuantisedAddition:
    """A residual as ONNX Runtime adds it: the layer's own result is rounded to ``low .. high`` around ``zero`` first.

    With ``a`` this result and ``b`` the residual, both as stored but for ``offset``, which is taken off, the sum is ``b
    residual_ratio + (a own_ratio + fixed)``, each product rounded together with its addition; ``own_last``: ``a
    own_ratio + (b residual_ratio + fixed)``. The offset is 128 where the model's bytes have a sign, whose sums FP32
    rounds otherwise.
    """

    low: int
    high: int
    zero: int
    own_ratio: float
    residual_ratio: float
    fixed: float
    offset: int = 0
    own_last: bool = False

    @property
    def own_ratios(self) -> tuple[float, float]:
        """By what this result is multiplied before the residual is added, and behind it: one of the two is zero, which
        changes nothing.
        """
        return (0.0, self.own_ratio) if self.own_last else (self.own_ratio, 0.0)


@dataclass(frozen=True, eq=False)
class Requantisation:
    """How sums of 32 bits become bytes, of layers of ``int8``.

    ``multiplier``, (out,) of float32: the scales of data and weights over that of the result. ``input_zero``: the zero
    point of the data, which stands in the padding too. A result is ``sum * multiplier``, rounded to the nearest, ties
    to even, plus ``zero``, within ``low .. high`` (an activation that only cuts off is part of these).

    ``addition``: of a layer with a residual; the zero point is then in its fixed part, and ``zero`` is its offset.

    ``step``: of a layer whose epilogue has an activation, the scale of the result; ``multiplier`` is then the scales of
    data and weights alone, and what the activation makes of ``sum * multiplier + bias`` is divided by ``step`` before
    it is rounded.
    """

    multiplier: np.ndarray
    input_zero: int = 0
    low: int = 0
    high: int = 255
    zero: int = 0
    addition: QuantisedAddition | None = None
    step: float = 0.0


@dataclass(frozen=True, eq=False)
class Parameters:
    """Weights of one layer in the framework's layout (OIHW, or (out, in)); ``bias``, ``scale``, ``shift`` are (out,).

    ``scale`` and ``shift`` are those of an epilogue's affine, and ``None`` where it has none; ``input_scale`` and
    ``input_shift``, (in,), those of a prologue; ``slopes``, (out,), those of a ``prelu``.

    Of a layer of ``int8`` weights are whole numbers of 8 bits with a sign, the bias is one of 32 bits, in units
    of the sums (before an activation it is of float32, no part of them), and ``requantisation`` says what becomes of
    them.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    input_scale: np.ndarray | None = None
    input_shift: np.ndarray | None = None
    slopes: np.ndarray | None = None
    requantisation: Requantisation | None = None


@dataclass(frozen=True, eq=False)
class SummedBuild:
    """``function`` has, behind its output, sums of what it wrote: (N, blocks of channels, parts of the image, V)."""

    function: tirx.PrimFunc
    sums_shape: tuple[int, int, int, int]


class Template(Protocol):
    """A family of kernels for one kind of operator. ``operator`` is one that it covers, in all but :meth:`covers`."""

    family: str

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        """Whether it makes kernels for ``operator``, whose dtype is one that ``cpu`` has kernels for."""
        ...

    def signature(self, operator: Any, cpu: CpuTarget) -> Signature:
        """Shapes and layouts of the arguments."""
        ...

    def space(self, operator: Any, cpu: CpuTarget) -> Sequence[Config]:
        """All legal configurations after pruning, the one of least :meth:`cost` first; deterministic, never empty."""
        ...

    def cost(self, operator: Any, config: Config, cpu: CpuTarget) -> float:
        """An analytic guess above zero, in cycles, that tells configurations of one operator apart."""
        ...

    def build(self, operator: Any, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        """The kernel of one configuration, with the parameters of :meth:`signature`."""
        ...

    def pack(self, operator: Any, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        """The constants of :meth:`signature` from the framework's weights."""
        ...

    def build_summed(self, operator: Any, config: Config, cpu: CpuTarget) -> SummedBuild | None:
        """The same kernel with one more result, from which a global average of the first is made without reading that
        (squeeze-and-excite); ``None`` where there is none.
        """
        return None

    def for_config(self, config: Config) -> Template:
        """The template that makes the kernel of ``config`` and knows its constants: itself, unless it has several."""
        return self

    def relative_rounding(self, config: Config) -> float:
        """The rounding error to be expected, relative to that of a sum of products one by one.

        A network that errs too much is built once more without what is above one.
        """
        return 1.0

    def work_split(self, config: Config, cpu: CpuTarget) -> WorkSplit:
        """By what the threads share the output: each takes consecutive tasks, pixels counted fastest.

        A kernel that splits otherwise than the one before it reads what another core has in its cache.
        """
        channel_tasks = config.get(CHANNEL_TASKS, 1)
        if channel_tasks == 1:
            return "pixels"
        return "channels" if channel_tasks % cpu.threads == 0 else "both"
