"""Interface of kernel templates, used by templates, tuner and lowering: what they compute, in which layouts and dtypes.

A template has a signature, knobs with their legal values, an analytic cost and a kernel;
:func:`schedules.kernels.template_table.register` makes it known. Activations are stored blocked, NCHW as (N, ceil(C/V),
H, W, V), where V is the number of FP32 values of a vector register.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from costmodel.base.errors import MissingDependencyError
from costmodel.cost_model import Config
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget

if TYPE_CHECKING:
    from tvm import tirx


EXTENSIONS = "fusion.extensions"


@lru_cache(maxsize=1)
def load_extensions() -> None:
    """Import the modules that installed packages name as entry points of :data:`EXTENSIONS`.

    They register templates (:func:`schedules.kernels.template_table.register`) and engines of ``fusion compare``
    (:func:`fusion.comparing.engine.register`). Raises ``MissingDependencyError`` if one cannot be imported.
    """
    for point in entry_points(group=EXTENSIONS):
        try:
            point.load()
        except Exception as error:  # any error of somebody else's module
            package = point.dist.name if point.dist else point.value
            raise MissingDependencyError(
                f"{package}: its {EXTENSIONS} {point.value} cannot be imported ({error}); mend or uninstall it"
            ) from error


def blocks(channels: int, lanes: int) -> int:
    """Number of channel blocks that hold ``channels``."""
    return -(-channels // lanes)


def blocked_shape(shape: tuple[int, ...], lanes: int) -> tuple[int, int, int, int, int]:
    """Blocked shape of an NCHW shape."""
    batch, channels, height, width = shape
    return (batch, blocks(channels, lanes), height, width, lanes)


def block(array: np.ndarray, lanes: int) -> np.ndarray:
    """Convert NCHW to blocked; lanes beyond the channels are zero."""
    batch, channels, height, width = array.shape
    count = blocks(channels, lanes)
    padded = np.zeros((batch, count * lanes, height, width), array.dtype)
    padded[:, :channels] = array
    return np.ascontiguousarray(padded.reshape(batch, count, lanes, height, width).transpose(0, 1, 3, 4, 2))


def unblock(array: np.ndarray, channels: int) -> np.ndarray:
    """Convert blocked to NCHW with the first ``channels`` channels."""
    batch, count, height, width, lanes = array.shape
    plain = array.transpose(0, 1, 4, 2, 3).reshape(batch, count * lanes, height, width)
    return np.ascontiguousarray(plain[:, :channels])


# Part of the key of every record. Increase it with any change of a template that changes the code of a configuration;
# the second if only code for values narrower than float32 changes.
TEMPLATE_REVISION = 5
NARROW_REVISION = 1


def template_revision(dtype: str = "float32") -> str:
    """Revision of the kernels of operators of ``dtype``."""
    return str(TEMPLATE_REVISION) if dtype == "float32" else f"{TEMPLATE_REVISION}.{NARROW_REVISION}"


# The only knob known outside of templates: number of parts of the output channels in the parallel tasks.
CHANNEL_TASKS = "channel_tasks"
# Division of a kernel's output among threads.
WorkSplit = Literal["channels", "pixels", "both"]


@dataclass(frozen=True)
class TensorSpec:
    """Shape, layout and dtype of one kernel argument; ``blocked`` is ``(N, ceil(C/V), H, W, V)``.

    Tensors of a quantised layer (``int8``) are ``uint8``.
    """

    shape: tuple[int, ...]
    layout: Literal["plain", "blocked"] = "plain"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", tensor_dtype(self.dtype))

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


def tensor_dtype(dtype: str) -> str:
    """Dtype of the tensors of an operator of ``dtype``."""
    return "uint8" if dtype == "int8" else dtype


def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype of this name, from ``ml_dtypes`` for those that NumPy lacks (``bfloat16``)."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@dataclass(frozen=True)
class Signature:
    """Arguments of a kernel, in the order data, gate (optional), constants, residual (optional), output."""

    data: TensorSpec
    constants: tuple[TensorSpec, ...]
    residual: TensorSpec | None
    output: TensorSpec
    gate: TensorSpec | None = None

    @property
    def arguments(self) -> tuple[TensorSpec, ...]:
        """All tensors of the kernel in argument order."""
        gate = () if self.gate is None else (self.gate,)
        residual = () if self.residual is None else (self.residual,)
        return (self.data, *gate, *self.constants, *residual, self.output)


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """``array`` as stored in kernel tensors of ``dtype``: 8-bit integers become bytes, signed or unsigned."""
    if dtype in ("int8", "uint8"):
        return np.ascontiguousarray(array).astype(np.int16).astype(np.uint8)  # modulo 256: the bits of a signed byte
    return np.ascontiguousarray(array, dtype=numpy_dtype(dtype))


@dataclass(frozen=True)
class QuantisedAddition:
    """Residual addition as in ONNX Runtime: the layer's result is first rounded to ``low .. high`` around ``zero``.

    With ``a`` this result and ``b`` the residual, both minus ``offset``, the sum is ``b residual_ratio + (a own_ratio +
    fixed)``, each product rounded together with its addition; with ``own_last`` it is ``a own_ratio + (b residual_ratio
    + fixed)``. The offset is 128 for models with signed bytes, whose sums are rounded differently in FP32.
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
        """Factors of this result before and after the addition of the residual: one is zero, which has no effect."""
        return (0.0, self.own_ratio) if self.own_last else (self.own_ratio, 0.0)


@dataclass(frozen=True, eq=False)
class Requantisation:
    """Conversion of 32-bit sums to bytes in ``int8`` layers.

    The result is ``sum * multiplier``, rounded to nearest, ties to even, plus ``zero``, clipped to ``low .. high``
    (which include clipping activations).
    """

    # Shape (out,), float32: scale of data times scale of weights divided by scale of the result.
    multiplier: np.ndarray
    # Zero point of the data, also used as padding.
    input_zero: int = 0
    low: int = 0
    high: int = 255
    zero: int = 0
    # For a layer with a residual; the zero point is then in its fixed part, and ``zero`` is its offset.
    addition: QuantisedAddition | None = None
    # For a layer with an activation in its epilogue: scale of the result. ``multiplier`` is then scale of data times
    # scale of weights, and the activation of ``sum * multiplier + bias`` is divided by ``step`` before rounding.
    step: float = 0.0


@dataclass(frozen=True, eq=False)
class Parameters:
    """Weights of one layer in the framework's layout."""

    # OIHW, or (out, in); for ``int8`` layers signed 8-bit integers.
    weight: np.ndarray
    # (out,); for ``int8`` 32-bit integers in units of the sums, or float32 added after scaling if an activation
    # follows.
    bias: np.ndarray | None = None
    # (out,): affine of the epilogue, or None.
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None
    # (in,): affine of the prologue, or None.
    input_scale: np.ndarray | None = None
    input_shift: np.ndarray | None = None
    # (out,): slopes of a ``prelu``.
    slopes: np.ndarray | None = None
    # For ``int8`` layers.
    requantisation: Requantisation | None = None


@dataclass(frozen=True, eq=False)
class SummedBuild:
    """Kernel with an additional result, sums of its output: (N, channel blocks, parts of the image, V)."""

    function: tirx.PrimFunc
    sums_shape: tuple[int, int, int, int]


class Template(Protocol):
    """A family of kernels for one kind of operator. All methods except :meth:`covers` require a covered
    ``operator``.
    """

    family: str

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        """True if there are kernels for ``operator``; ``cpu`` must support its dtype."""
        ...

    def signature(self, operator: Any, cpu: CpuTarget) -> Signature:
        """Shapes and layouts of the arguments."""
        ...

    def space(self, operator: Any, cpu: CpuTarget) -> Sequence[Config]:
        """All legal configurations after pruning, the one of smallest :meth:`cost` first; deterministic, never
        empty.
        """
        ...

    def cost(self, operator: Any, config: Config, cpu: CpuTarget) -> float:
        """Analytic cost estimate in cycles, above zero, for comparing configurations of one operator."""
        ...

    def build(self, operator: Any, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        """Build the kernel of one configuration, with the parameters of :meth:`signature`."""
        ...

    def pack(self, operator: Any, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        """Convert the framework's weights to the constants of :meth:`signature`."""
        ...

    def build_summed(self, operator: Any, config: Config, cpu: CpuTarget) -> SummedBuild | None:
        """Build the kernel with sums of its output as a further result, for a global average (squeeze-and-excite).

        None if the template has no such kernel.
        """
        return None

    def for_config(self, config: Config) -> Template:
        """Template that builds the kernel of ``config`` and its constants: itself, unless it combines several."""
        return self

    def relative_rounding(self, config: Config) -> float:
        """Expected rounding error relative to that of a plain sum of products.

        A network with too large errors is built again without configurations above one.
        """
        return 1.0

    def work_split(self, config: Config, cpu: CpuTarget) -> WorkSplit:
        """Division of the output among threads: each takes consecutive tasks, with pixels innermost.

        A kernel with another division than its predecessor reads data in another core's cache.
        """
        channel_tasks = config.get(CHANNEL_TASKS, 1)
        if channel_tasks == 1:
            return "pixels"
        return "channels" if channel_tasks % cpu.threads == 0 else "both"
