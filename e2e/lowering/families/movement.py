"""Data movement and selection: copies, casts, concatenation, indexing, interpolation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from costmodel.operators.device_work import Elementwise, MemoryCopy, Rearrangement
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    argument,
    contiguous_stride,
    elementwise,
    fill,
    gpu_inputs,
    gpu_outputs,
    host_transfer,
    is_on_gpu,
    numel,
    priced_dtype,
    rearrangement,
    size_bytes,
    stored_elements,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, tensors


def copy(context: Context, source: Tensor, target: Tensor, name: str, blocking: bool = True) -> list[DeviceWork]:
    """Return the launches of ``copy_``: a transfer, a memcpy, a cast, or a kernel that follows the strides."""
    if is_on_gpu(source) != is_on_gpu(target):
        kind = "device_to_host" if is_on_gpu(source) else "host_to_device"
        title = "Memcpy DtoH" if kind == "device_to_host" else "Memcpy HtoD"
        return [host_transfer(target, kind, title, blocking)]
    if not is_on_gpu(target) or numel(target) == 0:
        return []
    if priced_dtype(source) != priced_dtype(target):
        return [elementwise(context, "cast", target, [source], name=name)]
    if numel(source) < numel(target) or stored_elements(context, source) < numel(source):
        return [elementwise(context, "copy", target, [source], name=name)]
    inner = common_run(context, source, target)
    if inner >= numel(target):
        return [DeviceWork(name, (MemoryCopy(size_bytes(target), "device_to_device"),), "copy")]
    return [DeviceWork(name, (Rearrangement("transpose", numel(target), inner, priced_dtype(target)),))]


def common_run(context: Context, source: Tensor, target: Tensor) -> int:
    """Return the number of elements contiguous in both tensors, in the longest run that a copy can move together."""
    shape = target.shape
    if len(source.shape) != len(shape):
        return 1
    strides = list(zip(context.stride(source), context.stride(target), shape, strict=True))
    run = 1
    for from_stride, to_stride, extent in sorted(strides, key=lambda item: (item[1], item[0])):
        if extent == 1:
            continue
        if from_stride != run or to_stride != run:
            break
        run *= extent
    return run


def _copy_in_place(call: OperatorCall, context: Context) -> list[DeviceWork]:
    target, source = tensor_argument(call, 0), tensor_argument(call, 1)
    return copy(context, source, target, call.name, argument(call, 2, "non_blocking", False) is not True)


def _copy_new(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``clone``, ``contiguous`` and ``_to_copy``, by layout, type and device of the output."""
    source = tensor_argument(call, 0)
    results = list(tensors(call.outputs))
    if not results or results[0].storage == source.storage != -1:
        return []
    return copy(context, source, results[0], call.name, call.attributes.get("non_blocking") is not True)


def _read_scalar(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``.item()``: a copy of one value to the host, which waits for all earlier work."""
    source = tensor_argument(call, 0)
    return [host_transfer(source, "device_to_host", "Memcpy DtoH", synchronizes=True)] if is_on_gpu(source) else []


def _concatenate(call: OperatorCall, context: Context) -> list[DeviceWork]:
    parts, output = gpu_inputs(call), gpu_outputs(call)[0]
    dimension = argument(call, 1, "dim", 0)
    place = dimension if isinstance(dimension, int) else 0
    inner = min((prod(part.shape[place:]) for part in parts if numel(part)), default=1)
    layout = context.stride(output)
    plain = all(_is_dense(context.stride(part), part.shape, layout) for part in parts if numel(part))
    return [rearrangement("concat" if plain else "strided_concat", output, inner, max(len(parts), 1), call.name)]


def _is_dense(stride: Sequence[int], shape: Sequence[int], layout: Sequence[int]) -> bool:
    """True if a tensor leaves no gaps and has its dimensions in the order of the strides ``layout``."""
    if len(shape) != len(layout):
        return True  # an empty part of any rank is skipped
    step = 1
    for place in sorted(range(len(shape)), key=lambda each: layout[each]):
        if shape[place] > 1 and stride[place] != step:
            return False
        step *= shape[place]
    return True


def _split_copies(call: OperatorCall, context: Context) -> list[DeviceWork]:
    return [rearrangement("split", part, name=call.name) for part in gpu_outputs(call)]


def _block_diagonal(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``block_diag``: zeros, then a copy of each block (aten/src/ATen/native/TensorShape.cpp)."""
    blocks = [each for each in gpu_inputs(call) if numel(each)]
    return [
        *(fill(output) for output in gpu_outputs(call)),
        *(elementwise(context, "copy", each, [each], name=call.name) for each in blocks),
    ]


def _select(kind: str) -> Lowering:
    """Return the lowering of ``index_select``, ``gather``, ``take`` or ``index``: as many elements as the output
    has.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        source, output = tensor_argument(call, 0), gpu_outputs(call)[0]
        return [rearrangement(kind, output, _row(source, output), name=call.name)]

    return lower


def _elements(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``gather`` and ``take``: one index per element, or one expanded index for a run of elements."""
    source, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    inner = _expanded(gpu_inputs(call)[1:], context)
    record = Rearrangement("gather", numel(output), inner, priced_dtype(output), source_elements=numel(source))
    return [DeviceWork(call.name, (record,))]


def _expanded(others: Sequence[Tensor], context: Context) -> int:
    """Return the number of adjacent elements that share an index: the trailing dimensions in which it has stride 0."""
    index = next((tensor for tensor in others if tensor.dtype in ("int64", "int32")), None)
    if index is None:
        return 1
    run = 1
    for extent, step in zip(reversed(index.shape), reversed(context.stride(index)), strict=True):
        if step != 0 and extent != 1:
            break
        run *= extent
    return run


def _row(source: Tensor, output: Tensor) -> int:
    """Return the number of elements in the trailing dimensions that are copied whole."""
    run = 1
    for first, second in zip(reversed(source.shape[1:]), reversed(output.shape), strict=False):
        if first != second:
            break
        run *= first
    return run


def _scatter(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a scatter; the out-of-place form copies its first argument before."""
    target = tensor_argument(call, 0)
    values = [tensor for tensor in gpu_inputs(call)[1:] if tensor.dtype == target.dtype]
    indices = [tensor for tensor in gpu_inputs(call)[1:] if tensor.dtype != target.dtype]
    moved = max([*values, *indices], key=numel, default=target)
    written = Tensor(-1, -1, moved.shape, target.dtype, target.device)
    work = [rearrangement("scatter", written, _expanded(gpu_inputs(call)[1:], context), name=call.name)]
    if not call.name.endswith("_"):
        work = [*copy(context, target, gpu_outputs(call)[0], "aten::copy_"), *work]
    return work


def _index_put(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``index_put_``, which sorts the indices first if it accumulates (``index_put_with_sort_kernel``)."""
    target, places, values = tensor_argument(call, 0), argument(call, 1), tensor_argument(call, 2)
    written = Tensor(-1, -1, values.shape, target.dtype, target.device)
    work: list[DeviceWork] = []
    if argument(call, 3, "accumulate", False) is True and isinstance(places, tuple):
        indices = next((tensor for tensor in tensors(places)), written)
        work.append(rearrangement("sort", indices, inputs=2, name="cub::DeviceRadixSort"))
    return [*work, rearrangement("scatter", written, name=call.name)]


def _triangle(kind: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        output = gpu_outputs(call)[0]
        return [rearrangement(kind, output, output.shape[-1], name=call.name)]

    return lower


def _pad(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower padding: a fill of the output, then a copy of the source into it."""
    source, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    inside = Tensor(-1, -1, source.shape, source.dtype, source.device, contiguous_stride(source.shape))
    moved = Rearrangement("transpose", numel(inside), source.shape[-1] if source.shape else 1, priced_dtype(inside))
    return [fill(output, "aten::fill_"), DeviceWork("aten::copy_", (moved,))]


def _slice_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the gradient of a view: zeros of the whole tensor, then a copy of the part."""
    gradient, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    inner = gradient.shape[-1] if gradient.shape else 1
    moved = Rearrangement("transpose", numel(gradient), inner, priced_dtype(gradient))
    clear = elementwise(context, "fill", output, (), 1, "aten::zero_", auxiliary=True)
    return [clear, DeviceWork("aten::copy_", (moved,), auxiliary=True)]


def _resample(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower interpolation, which reads its source about once, even if larger than the output, and computes each
    element.
    """
    source, output = gpu_inputs(call)[0], gpu_outputs(call)[0]
    record = Elementwise("interpolate", numel(output), 0, 1, stored_elements(context, source), priced_dtype(output))
    return [DeviceWork(call.name, (record,))]


def _repeat(call: OperatorCall, context: Context) -> list[DeviceWork]:
    return [elementwise(context, "copy", gpu_outputs(call)[0], gpu_inputs(call)[:1], name=call.name)]


UPSAMPLING = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "grid_sampler_2d",
    "grid_sampler_3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
)

TABLE: dict[str, Lowering] = {
    "aten::copy_": _copy_in_place,
    "aten::clone": _copy_new,
    "aten::_to_copy": _copy_new,
    "aten::contiguous": _copy_new,
    "aten::_reshape_copy": _copy_new,
    "aten::to": _copy_new,
    "aten::view_copy": _copy_new,
    "aten::expand_copy": _copy_new,
    "aten::_local_scalar_dense": _read_scalar,
    "aten::cat": _concatenate,
    "aten::stack": _concatenate,
    "aten::block_diag": _block_diagonal,
    "aten::split_with_sizes_copy": _split_copies,
    "aten::split_copy": _split_copies,
    "aten::index_select": _select("gather"),
    "aten::gather": _elements,
    "aten::take": _elements,
    "aten::take_along_dim": _elements,
    "aten::index": _select("index"),
    "aten::masked_select": _select("index"),
    "aten::roll": _select("index"),
    "aten::flip": _select("index"),
    **dict.fromkeys(
        (f"aten::{name}{form}" for name in ("scatter", "scatter_add", "index_add", "index_copy") for form in ("", "_")),
        _scatter,
    ),
    "aten::scatter_reduce": _scatter,
    "aten::scatter_reduce_": _scatter,
    "aten::index_fill_": _scatter,
    "aten::masked_scatter": _scatter,
    "aten::index_put_": _index_put,
    "aten::index_put": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::tril": _triangle("tril"),
    "aten::triu": _triangle("triu"),
    "aten::tril_": _triangle("tril"),
    "aten::triu_": _triangle("triu"),
    "aten::constant_pad_nd": _pad,
    "aten::slice_backward": _slice_backward,
    "aten::select_backward": _slice_backward,
    "aten::repeat": _repeat,
    "aten::repeat_interleave": _repeat,
    **{f"aten::{name}": _resample for name in UPSAMPLING},
    **{f"aten::{name}_backward": _resample for name in UPSAMPLING},
}
