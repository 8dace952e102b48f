"""Operator records of GPU kernels, beyond the convolutions of :mod:`costmodel.operators.layers`.

As there, they describe the computation, not its implementation; framework shapes; a multiply-accumulate counts as
two flops. ``read_bytes`` and ``write_bytes`` must cross the chip's border at least once with cold caches.
``direction`` is ``forward`` or ``backward``; a backward kernel computes the gradients that its record names.

``scaling`` of work in 8-bit dtypes: the values that share a scale: ``tensor`` (all of it), ``row`` (each row of the
first operand, each column of the second), ``block`` (1 x 128 of activations, 128 x 128 of weights: DeepSeek-V3,
arXiv 2412.19437), ``mx`` (32 along a row: OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from costmodel.operators.attention import Attention, CausalConvolution, LinearAttention
from costmodel.operators.experts import ExpertLayer, GroupedGemm
from costmodel.operators.layers import Conv2d, CountedWork, element_bytes, stored_bytes
from costmodel.operators.lookups import Direction, EmbeddingLookup

SCALINGS = ("tensor", "row", "block", "mx")
# Elements that share a scale along a row, and bytes of a scale: FP32, one byte for ``mx``.
_SHARED = {"block": (128, 4), "mx": (32, 1)}


@dataclass(frozen=True)
class ScaledGemm(CountedWork):
    """Product (m, k) x (k, n) of 8-bit operands, summed in FP32 (``int8``: in int32) and written as
    ``output_dtype``.
    """

    m: int
    n: int
    k: int
    dtype: str = "float8"
    scaling: str = "tensor"
    output_dtype: str = "bfloat16"
    # Not in the repr, whose checksum assigns the rows of a table to splits (`split_of`).
    # Dtype of existing values to which the result is added; empty: none.
    accumulates: str = field(default="", repr=False)
    # Partial sums are promoted to FP32 outside the tensor cores, the default for gradients (``use_split_accumulator``
    # of Transformer Engine, ``use_fast_accum=False`` of torchao) but not for forward products.
    split_sums: bool = field(default=False, repr=False)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def read_bytes(self) -> int:
        elements = (self.m + self.n) * self.k
        shared, size = _SHARED.get(self.scaling, (0, 0))
        read = elements * element_bytes(self.dtype) + (elements // shared * size if shared else 0)
        return read + (self.write_bytes if self.accumulates else 0)

    @property
    def write_bytes(self) -> int:
        return self.m * self.n * element_bytes(self.accumulates or self.output_dtype)


@dataclass(frozen=True)
class StoredGemm(CountedWork):
    """Product (m, k) x (k, n) with a matrix of weights ``stored`` in fewer bits (:data:`STORED_BITS`) than the
    operands of ``dtype`` that are multiplied: 16 bits (AWQ, GPTQ, Marlin, weight-only integers), or ``float4``, whose
    rows are then in 4 bits too. Results have 16 bits.
    """

    m: int
    n: int
    k: int
    stored: str
    dtype: str = "bfloat16"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def read_bytes(self) -> int:
        return math.ceil(self.n * self.k * stored_bytes(self.stored, self.dtype)) + self.m * self.k * element_bytes(
            self.dtype
        )

    @property
    def write_bytes(self) -> int:
        return self.m * self.n * 2


@dataclass(frozen=True)
class ScaledCast(CountedWork):
    """Cast of ``rows`` x ``columns`` values of ``dtype`` to 8 bits in one kernel."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    scaling: str = "tensor"
    # 1; 2 if the transposed copy for the gradients is written too; 0 for only a search of the largest absolute value
    # (the pass before a cast with one scale of the present tensor).
    outputs: int = 1
    # The kernel computes its scales itself, for the rows or blocks that it holds.
    dynamic: bool = False
    output_dtype: str = "float8"

    @property
    def elements(self) -> int:
        """Number of values to cast."""
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        return 2 * self.elements

    @property
    def read_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.outputs * self.elements * element_bytes(self.output_dtype)


@dataclass(frozen=True)
class Gemm(CountedWork):
    """``batch`` products of (m, k) x (k, n), row-major. ``transpose_*``: that operand is stored transposed."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str = "float32"
    transpose_a: bool = False
    transpose_b: bool = False
    # A row of n values is added (``addmm``, ``linear``).
    bias: bool = False
    # Not in the repr, whose checksum assigns the rows of a table to splits (`split_of`).
    # Dtype of existing values to which the result is added, as for gradients of weights
    # (``gradient_accumulation_fusion`` of Megatron-LM); empty: none.
    accumulates: str = field(default="", repr=False)

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def read_bytes(self) -> int:
        elements = self.batch * (self.m * self.k + self.k * self.n) + (self.n if self.bias else 0)
        return elements * element_bytes(self.dtype) + (self.write_bytes if self.accumulates else 0)

    @property
    def write_bytes(self) -> int:
        return self.batch * self.m * self.n * element_bytes(self.accumulates or self.dtype)


@dataclass(frozen=True)
class ConvolutionBackward(CountedWork):
    """Gradient of a convolution ``wrt`` its input (``data``) or its weights (``weight``)."""

    forward: Conv2d
    wrt: Literal["data", "weight"]

    @property
    def dtype(self) -> str:
        """Dtype of the forward convolution."""
        return self.forward.dtype

    @property
    def flops(self) -> int:
        return self.forward.flops

    @property
    def read_bytes(self) -> int:
        other = self.forward.weight_bytes if self.wrt == "data" else self.forward.input_bytes
        return self.forward.output_bytes + other

    @property
    def write_bytes(self) -> int:
        return self.forward.input_bytes if self.wrt == "data" else self.forward.weight_bytes


@dataclass(frozen=True)
class Elementwise(CountedWork):
    """Element-wise operation ``kind`` (``add``, ``gelu``, ``relu``, ``dropout``, ``fused`` ...) over ``elements``
    outputs.

    ``inputs``: full-size tensors read; ``outputs``: written; ``broadcast_elements``: elements of the smaller operands.
    ``output_dtype`` differs for casts and comparisons. ``strided_elements``: elements of ``inputs`` that neighbouring
    threads read from different memory sectors; each sector is reused after ``reuse_bytes`` of others. ``one_by_one``:
    operands are addressed or converted element by element, as PyTorch does those that are broadcast, in another order
    than the output, or of another type; it reads others in vectors. ``instructions`` of each output, where they are
    known and more than a few, as in filters. ``chained``: loads that a thread makes one after the other, where it walks
    a ``column`` of so many elements alone, as in scans along an outer dimension.
    """

    kind: str
    elements: int
    inputs: int = 1
    outputs: int = 1
    broadcast_elements: int = 0
    dtype: str = "float32"
    output_dtype: str = ""
    strided_elements: int = 0
    reuse_bytes: int = 0
    one_by_one: bool = False
    instructions: int = 0
    # Not in the repr, like `Normalization.apart`.
    chained: int = field(default=0, repr=False)
    column: int = field(default=1, repr=False)

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def read_bytes(self) -> int:
        return (self.inputs * self.elements + self.broadcast_elements) * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.outputs * self.elements * element_bytes(self.output_dtype or self.dtype)


@dataclass(frozen=True)
class Normalization(CountedWork):
    """Normalisation. ``kind``: ``layer_norm``, ``rms_norm`` over the last ``columns`` of ``rows``; ``batch_norm`` over
    ``rows`` = N x H x W of ``columns`` = C channels. ``training``: batch statistics are computed. ``channels_last``:
    memory layout of a batch of images. ``apart``: of one picture, as instance norm is computed, or of volumes.
    """

    kind: str
    rows: int
    columns: int
    dtype: str = "float32"
    direction: Direction = "forward"
    training: bool = True
    channels_last: bool = False
    # Not in the repr, whose checksum assigns the rows of a table to splits.
    apart: bool = field(default=False, repr=False)

    @property
    def takes_statistics(self) -> bool:
        """True if sums over all normalised values come first: statistics of the batch, or those of the gradient."""
        return self.training or self.direction == "backward"

    @property
    def flops(self) -> int:
        return 8 * self.rows * self.columns

    @property
    def read_bytes(self) -> int:
        tensors = 1 if self.direction == "forward" else 2
        return (tensors * self.rows + 2) * self.columns * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.rows * self.columns * element_bytes(self.dtype)


@dataclass(frozen=True)
class Softmax(CountedWork):
    """Softmax or log-softmax over ``columns`` of each of ``rows``."""

    rows: int
    columns: int
    dtype: str = "float32"
    direction: Direction = "forward"
    kind: Literal["softmax", "log_softmax"] = "softmax"

    @property
    def flops(self) -> int:
        return 5 * self.rows * self.columns

    @property
    def read_bytes(self) -> int:
        tensors = 1 if self.direction == "forward" else 2
        return tensors * self.rows * self.columns * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.rows * self.columns * element_bytes(self.dtype)


@dataclass(frozen=True)
class Reduction(CountedWork):
    """Reduction ``kind`` (``sum``, ``mean``, ``max``, ``norm`` ...) of ``elements`` inputs to ``outputs`` values.

    ``contiguous``: the reduced dimension is the innermost one. ``one_by_one``: several dimensions are reduced that do
    not follow each other in memory, so that the place of every element is found by divisions.
    """

    kind: str
    elements: int
    outputs: int
    dtype: str = "float32"
    contiguous: bool = True
    one_by_one: bool = False

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def read_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.outputs * element_bytes(self.dtype)


@dataclass(frozen=True)
class MemoryCopy(CountedWork):
    """Copy of ``size_bytes`` from one memory to another; ``pinned``: the host's side is page-locked."""

    size_bytes: int
    kind: Literal["host_to_device", "device_to_host", "device_to_device", "memset", "peer"] = "device_to_device"
    pinned: bool = False

    @property
    def flops(self) -> int:
        return 0

    @property
    def read_bytes(self) -> int:
        return 0 if self.kind == "memset" else self.size_bytes

    @property
    def write_bytes(self) -> int:
        return self.size_bytes


@dataclass(frozen=True)
class Rearrangement(CountedWork):
    """Data movement without arithmetic: ``transpose`` (copy of a permuted view), ``concat``, ``split``, ``gather``,
    ``scatter``, ``index``, ``tril``, ``triu``. ``elements``: number written.

    ``inner``: length of the longest contiguous run that moves together, in elements; a gathered run has an index.
    ``source_elements``: number in the tensor that elements are gathered from; 0 if unknown.
    """

    kind: str
    elements: int
    inner: int = 1
    dtype: str = "float32"
    inputs: int = 1
    source_elements: int = 0

    @property
    def flops(self) -> int:
        return 0

    @property
    def is_by_element(self) -> bool:
        """True if every element has an index of its own (``torch.gather``)."""
        return self.kind == "gather" and self.inner == 1

    @property
    def read_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)


@dataclass(frozen=True)
class RadixSort(CountedWork):
    """Sort of ``pairs`` by key (cub): keys of ``bits`` significant bits with a value, ``pair_bytes`` together."""

    pairs: int
    bits: int
    pair_bytes: int = 16
    dtype: str = "int64"

    @property
    def flops(self) -> int:
        return 0

    @property
    def read_bytes(self) -> int:
        return self.pairs * self.pair_bytes

    @property
    def write_bytes(self) -> int:
        return self.pairs * self.pair_bytes


@dataclass(frozen=True)
class Pooling(CountedWork):
    """Window pooling over (batch, channels, height, width) to (out_height, out_width); NHWC if ``channels_last``.

    The maximum is stored with its index, an int64, which PyTorch writes in inference too (``max_pool2d_with_indices``)
    and the backward pass reads.
    """

    kind: Literal["max", "average"]
    batch: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel: tuple[int, int]
    dtype: str = "float32"
    direction: Direction = "forward"
    channels_last: bool = False

    @property
    def flops(self) -> int:
        return self.batch * self.channels * self.out_height * self.out_width * self.kernel[0] * self.kernel[1]

    @property
    def read_bytes(self) -> int:
        return self._image_bytes if self.direction == "forward" else self._result_bytes

    @property
    def write_bytes(self) -> int:
        return self._result_bytes if self.direction == "forward" else self._image_bytes

    @property
    def _image_bytes(self) -> int:
        return self.batch * self.channels * self.height * self.width * element_bytes(self.dtype)

    @property
    def _result_bytes(self) -> int:
        place = element_bytes("int64") if self.kind == "max" else 0
        made = self.batch * self.channels * self.out_height * self.out_width
        return made * (element_bytes(self.dtype) + place)


@dataclass(frozen=True)
class OptimizerStep(CountedWork):
    """One multi-tensor kernel of an optimizer over ``elements`` in ``tensors`` tensors.

    ``kind``: ``sgd``, ``adam``, ``adamw``, ``adagrad`` (whole updates, ``fused``), or the element-wise pieces of the
    foreach form (``foreach_add``, ``foreach_mul`` ...), with ``reads`` and ``writes`` full-size tensors.
    """

    kind: str
    elements: int
    tensors: int
    reads: int
    writes: int
    dtype: str = "float32"

    @property
    def flops(self) -> int:
        return self.elements * (self.reads + self.writes)

    @property
    def read_bytes(self) -> int:
        return self.reads * self.elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.writes * self.elements * element_bytes(self.dtype)


@dataclass(frozen=True)
class Loss(CountedWork):
    """Loss ``kind`` (``nll``, ``cross_entropy``, ``bce``, ``mse``) over ``rows`` of ``columns`` classes. ``nll`` picks
    one value of each row, and reads nothing backward.
    """

    kind: str
    rows: int
    columns: int
    dtype: str = "float32"
    direction: Direction = "forward"

    @property
    def flops(self) -> int:
        return 4 * self.rows * (self.columns if self.kind != "nll" else 1)

    @property
    def read_bytes(self) -> int:
        columns = self.columns if self.kind != "nll" else int(self.direction == "forward")
        return self.rows * columns * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        elements = self.rows * self.columns if self.direction == "backward" else self.rows
        return elements * element_bytes(self.dtype)


DeviceOperator = (
    Gemm
    | Conv2d
    | ConvolutionBackward
    | Elementwise
    | Normalization
    | Softmax
    | Attention
    | Reduction
    | EmbeddingLookup
    | MemoryCopy
    | Rearrangement
    | RadixSort
    | Pooling
    | OptimizerStep
    | Loss
    | GroupedGemm
    | ExpertLayer
    | ScaledGemm
    | StoredGemm
    | ScaledCast
    | LinearAttention
    | CausalConvolution
)
