"""Records of device work, and what the lowering tables make it from: arguments, sizes and memory layouts of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Elementwise, MemoryCopy, Rearrangement
from costmodel.operators.layers import DTYPE_BYTES
from e2e.step.execution_graph import TaskKind
from e2e.step.operator_trace import OperatorCall, Tensor, Value, tensors
from e2e.step.options import StepOptions

SECTOR_BYTES = 32  # smallest DRAM access (CUDA C++ Best Practices Guide, coalesced access)


def strided_reads(
    shape: Sequence[int], result: Sequence[int], operand: Sequence[int], element_bytes: int
) -> tuple[float, int]:
    """Return the uncoalesced fraction of a full-size operand's elements, and the reuse distance of their sectors in
    bytes.

    Fraction of elements that lie in different sectors for adjacent threads; bytes of other sectors touched before the
    next element of the same sector is read. ``result``, ``operand``: strides in elements. Threads follow the result,
    along its smallest stride.
    """
    order = sorted((dim for dim, extent in enumerate(shape) if extent > 1), key=lambda dim: result[dim])
    if not order:
        return 0.0, 0
    step = operand[order[0]] * element_bytes
    if step <= element_bytes:
        return 0.0, 0
    share = min(1.0, (step - element_bytes) / (SECTOR_BYTES - element_bytes))
    near = [dim for dim in order if 0 < operand[dim] * element_bytes < SECTOR_BYTES]
    # The next element in the sector is one step further along the first such dimension of the result.
    return share, (result[near[0]] if near else 0) * SECTOR_BYTES


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if a batch of images is NHWC in memory; ambiguous extents of 1 are decided as in PyTorch
    (``is_channels_last_strides_2d_s4`` in c10/core/MemoryFormat.h).
    """
    if len(shape) != 4 or stride[1] == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * max(shape[dim], 1)
    return True


def lies_dense(shape: Sequence[int], stride: Sequence[int], channels_last: bool) -> bool:
    """True if a tensor is row-major without gaps, as NHWC if ``channels_last``; extents of 1 do not matter."""
    order = (0, 2, 3, 1) if channels_last and len(shape) == 4 else tuple(range(len(shape)))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != step:
            return False
        step *= shape[dim]
    return True


# Types that the cost models price like another type of the same size.
SAME_SIZE = {
    "int16": "float16",
    "uint16": "float16",
    "complex64": "int64",
    "complex128": "int64",
    "uint32": "int32",
    "uint64": "int64",
    "int4": "int8",
}


class UnforeseenCall(Exception):
    """Raised for a call that the table of lowerings does not support; its operator is then treated as unknown."""


@dataclass(frozen=True)
class DeviceWork:
    """Kernel, copy or memset launched by an operator."""

    name: str
    operators: tuple[AnyOperator, ...]
    kind: TaskKind = "kernel"
    # True for a fill or copy that is a nested call where the source records nested calls, and is otherwise launched by
    # the operator itself.
    auxiliary: bool = False
    # True if the host waits for it.
    synchronizes: bool = False
    # Number of launches that together take the time of `operators`.
    launches: int = 1


@dataclass
class Context:
    """State of lowering besides the call."""

    options: StepOptions = field(default_factory=StepOptions)
    # (tensor id, storage) -> strides that a trace gives only for views.
    strides: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    # Compiled regions of the calls in a program; None if the source does not say what is compiled.
    regions: Mapping[int, int] | None = None
    # Forward calls of lookups, whose backward calls lack the arguments.
    lookups: list[OperatorCall] = field(default_factory=list)

    def is_compiled(self, call: OperatorCall) -> bool:
        """True if the kernels of ``call`` are those of a compiler."""
        return self.options.compile and (self.regions is None or call.id in self.regions)

    def stride(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the strides in elements; contiguous if the source does not give them."""
        known = tensor.stride or self.strides.get((tensor.id, tensor.storage))
        if known is not None and len(known) == len(tensor.shape):
            return known
        return contiguous_stride(tensor.shape)


Lowering = Callable[[OperatorCall, Context], list[DeviceWork]]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def numel(tensor: Tensor) -> int:
    """Return the number of elements of ``tensor``."""
    return prod(tensor.shape)


def priced_dtype(tensor: Tensor) -> str:
    """Return a dtype that the cost models price; other types by their size, or as float32."""
    if tensor.dtype in DTYPE_BYTES:
        return tensor.dtype
    if tensor.dtype.startswith("float8"):
        return "float8"
    return SAME_SIZE.get(tensor.dtype, "float32")


def size_bytes(tensor: Tensor) -> int:
    """Return the bytes of ``tensor`` by shape and number type."""
    return numel(tensor) * DTYPE_BYTES[priced_dtype(tensor)]


def is_on_gpu(tensor: Tensor) -> bool:
    """True if ``tensor`` is in GPU memory."""
    return tensor.device != "cpu" and tensor.device != ""


def gpu_inputs(call: OperatorCall) -> list[Tensor]:
    """Return the input tensors of the call in GPU memory, in order."""
    return [tensor for tensor in tensors(call.inputs) if is_on_gpu(tensor)]


def gpu_outputs(call: OperatorCall) -> list[Tensor]:
    """Return the output tensors of the call in GPU memory, in order."""
    return [tensor for tensor in tensors(call.outputs) if is_on_gpu(tensor)]


def argument(call: OperatorCall, place: int, name: str = "", default: Value = None) -> Value:
    """Return an argument by index, or by name if the source keeps keyword arguments apart."""
    if place < len(call.inputs):
        return call.inputs[place]
    return call.attributes.get(name, default) if name else default


def tensor_argument(call: OperatorCall, place: int) -> Tensor:
    """Return the tensor at ``place``; raise :class:`UnforeseenCall` if there is none."""
    value = argument(call, place)
    if not isinstance(value, Tensor):
        raise UnforeseenCall(f"{call.name}: argument {place} is no tensor")
    return value


def integers(value: Value) -> tuple[int, ...]:
    """Return a number or a list of numbers as a tuple."""
    if isinstance(value, tuple):
        return tuple(int(item) for item in value if isinstance(item, (int, float)))
    return (int(value),) if isinstance(value, (int, float)) else ()


def pair(value: Value, default: int) -> tuple[int, int]:
    """Return height and width of a window; a single number is used for both."""
    numbers = integers(value)
    if not numbers:
        return default, default
    return (numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def stored_elements(context: Context, tensor: Tensor) -> int:
    """Return the number of elements in memory; expanded dimensions (stride 0) count once."""
    strides = context.stride(tensor)
    return prod(extent for extent, step in zip(tensor.shape, strides, strict=True) if step != 0 or extent == 1)


def elementwise(
    context: Context,
    kind: str,
    output: Tensor,
    inputs: Iterable[Tensor],
    outputs: int = 1,
    name: str = "",
    auxiliary: bool = False,
) -> DeviceWork:
    """Return a kernel that reads ``inputs`` (full-size or broadcast) and writes ``outputs`` tensors like ``output``."""
    elements = numel(output)
    full, broadcast, dtype, scattered, reuse = 0, 0, "", 0, 0
    inputs = list(inputs)
    for tensor in inputs:
        count = stored_elements(context, tensor)
        if count >= elements:
            dtype = dtype or priced_dtype(tensor)
            width = DTYPE_BYTES[dtype]
            if DTYPE_BYTES[priced_dtype(tensor)] == width:
                full += 1
            else:
                # Element size differs from the first input: bytes are counted in elements of the first.
                broadcast += count * DTYPE_BYTES[priced_dtype(tensor)] // width
            if tensor.shape == output.shape:
                width = DTYPE_BYTES.get(priced_dtype(tensor), 4)
                share, bytes_between = strided_reads(
                    output.shape, context.stride(output), context.stride(tensor), width
                )
                scattered += round(share * elements)
                reuse = max(reuse, bytes_between)
        else:
            broadcast += count
    target = priced_dtype(output)
    dtype = dtype or target
    other = "" if target == dtype else target
    apart = any(not _in_vectors(context, kind, tensor, output, inputs) for tensor in inputs)
    record = Elementwise(kind, elements, full, outputs, broadcast, dtype, other, scattered, reuse, apart)
    return DeviceWork(name or kind, (record,), auxiliary=auxiliary)


def _in_vectors(context: Context, kind: str, tensor: Tensor, output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """True if PyTorch's element-wise kernel reads ``tensor`` in vectors: it is dense, in the order of ``output``, and
    of the type computed in. Casts from FP32 to 16 bits have kernels that take FP32.
    """
    if kind == "cast" and not (tensor.dtype == "float32" and output.dtype in ("float16", "bfloat16")):
        return False
    if kind != "cast" and len({each.dtype for each in inputs if "float" in each.dtype}) > 1:
        return False
    steps, others = (
        [each for each in zip(context.stride(one), one.shape, strict=True) if each[1] != 1] for one in (tensor, output)
    )
    dense = 1
    for step, extent in sorted(steps):
        if step != dense:
            return False
        dense *= extent
    return steps == others


def fill(tensor: Tensor, name: str = "fill") -> DeviceWork:
    """Return a fill kernel (PyTorch fills by an element-wise kernel, not by a memset, except for whole zeroed
    storages).
    """
    record = Elementwise("fill", numel(tensor), 0, 1, 0, priced_dtype(tensor))
    return DeviceWork(name, (record,), auxiliary=True)


def memset(tensor: Tensor, name: str = "memset") -> DeviceWork:
    """Return ``cudaMemsetAsync`` over the tensor."""
    return DeviceWork(name, (MemoryCopy(size_bytes(tensor), "memset"),), "memset", auxiliary=True)


def host_transfer(tensor: Tensor, kind: str, name: str, synchronizes: bool) -> DeviceWork:
    """Return a copy between host and device.

    A copy that the host does not wait for uses pinned memory: with pageable memory the driver would make the host wait.
    """
    way: Literal["host_to_device", "device_to_host"] = (
        "host_to_device" if kind == "host_to_device" else "device_to_host"
    )
    record = MemoryCopy(size_bytes(tensor), way, pinned=not synchronizes)
    return DeviceWork(name, (record,), "copy", synchronizes=synchronizes)


def rearrangement(kind: str, tensor: Tensor, inner: int = 1, inputs: int = 1, name: str = "") -> DeviceWork:
    """Return a kernel that moves the elements of ``tensor``."""
    record = Rearrangement(kind, numel(tensor), max(inner, 1), priced_dtype(tensor), inputs)
    return DeviceWork(name or kind, (record,))
