"""Reductions, scans and sorts; softmax; loss functions; Fourier transforms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil, log, prod

from costmodel.operators.device_work import Elementwise, Loss, Reduction, Softmax
from costmodel.operators.layers import DTYPE_BYTES
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    argument,
    elementwise,
    gpu_inputs,
    gpu_outputs,
    host_transfer,
    integers,
    memset,
    numel,
    priced_dtype,
    rearrangement,
    size_bytes,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor, Value

REDUCTIONS = (
    "sum",
    "mean",
    "prod",
    "max",
    "min",
    "amax",
    "amin",
    "aminmax",
    "argmax",
    "argmin",
    "all",
    "any",
    "norm",
    "std",
) + ("var", "var_mean", "std_mean", "linalg_vector_norm", "logsumexp", "nansum", "count_nonzero", "median", "mode")
# Points of single precision (8 bytes each) in 32 KiB of shared memory; largest prime with kernels in cuFFT.
_FOURIER_POINTS, _FOURIER_PRIME = 4096, 127
SCANS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "_cumsum", "cumsum_")


def reduction(
    kind: str,
    data: Tensor,
    output: Tensor,
    context: Context,
    name: str,
    dimensions: Value = None,
    compiled: bool = False,
) -> DeviceWork:
    """Return the reduction of ``data`` to ``output`` along ``dimensions`` (default: those that the shapes tell);
    contiguous if the innermost one is reduced, one by one (unless compiled) if those reduced do not follow each other
    in memory.
    """
    reduced, stride = _reduced(data, output, dimensions), context.stride(data)
    order = sorted((each for each, size in enumerate(data.shape) if size > 1), key=lambda each: stride[each])
    inside = [each for each in order if each in reduced]
    apart = not compiled and any(
        stride[outer] != stride[inner] * data.shape[inner] for inner, outer in pairwise(inside)
    )
    contiguous = numel(output) == 1 or not order or order[0] in reduced
    return DeviceWork(name, (Reduction(kind, numel(data), numel(output), priced_dtype(data), contiguous, apart),))


def _reduced(data: Tensor, output: Tensor, dimensions: Value) -> set[int]:
    rank, shape = len(data.shape), output.shape
    if numel(output) == 1:
        return set(range(rank))
    if len(shape) == rank:
        return {each for each in range(rank) if shape[each] != data.shape[each]}
    told = {each % rank for each in integers(dimensions)}
    return told or {each for each in range(rank) if data.shape[each] not in shape}


def _summed(kind: str, data: Tensor, output: Tensor, context: Context, call: OperatorCall) -> list[DeviceWork]:
    """Return a reduction, and before it the memset of its counters if several blocks share an output
    (``setReduceConfig`` in Reduce.cuh: 256 values for each thread, of which 512 share a contiguous row, 4 a column).
    """
    dimensions = argument(call, 2 if "norm" in kind else 1, "dim")
    work = reduction(kind, data, output, context, call.name, dimensions, context.is_compiled(call))
    (record,) = work.operators
    assert isinstance(record, Reduction)
    shared = _VALUES * (_ROW_THREADS if record.contiguous else _COLUMN_THREADS)
    if context.is_compiled(call) or numel(data) < shared * max(numel(output), 1):
        return [work]
    return [replace(memset(Tensor(-1, -1, (1,), "int32", data.device)), auxiliary=False), work]


_VALUES, _ROW_THREADS, _COLUMN_THREADS = 256, 512, 4


def _reduce(name: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data, outputs = tensor_argument(call, 0), gpu_outputs(call)
        if len(gpu_inputs(call)) > 1 and name in ("max", "min"):
            return [elementwise(context, name, outputs[0], gpu_inputs(call), 1, call.name)]
        return _summed(name, data, outputs[0], context, call)

    return lower


def _scan(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a scan; ``cummax`` and ``cummin`` also write indices. Along an outer dimension a thread walks a column."""
    data, (output, *places) = tensor_argument(call, 0), gpu_outputs(call)
    work = elementwise(context, "scan", output, [data, *places], 1, call.name)
    dimension = argument(call, 1, "dim", -1)
    return [work if _inner(data, dimension) == 1 else _walking(work, data, dimension, _SCAN_LOADS)]


# Loads of a step of a scan: the next element is loaded after the previous result is stored.
_SCAN_LOADS = 2


def _walking(work: DeviceWork, data: Tensor, dimension: Value, loads: int) -> DeviceWork:
    """``work`` whose threads make ``loads`` for each element of a column of ``data`` along ``dimension``."""
    _, column = _rows(data, dimension)
    (record,) = work.operators
    assert isinstance(record, Elementwise)
    return replace(work, operators=(replace(record, chained=loads * column, column=max(column, 1)),))


def _sort(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a segmented radix sort of values and indices: an index fill, then the sort."""
    data = tensor_argument(call, 0)
    return [rearrangement("sort", data, name=call.name), rearrangement("sort", data, inputs=2, name=call.name)]


def _rows(data: Tensor, dimension: object) -> tuple[int, int]:
    """Return (rows, columns) of an operator along ``dimension``."""
    place = dimension if isinstance(dimension, int) else -1
    columns = data.shape[place] if data.shape else 1
    return numel(data) // max(columns, 1), columns


def _softmax(kind: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, 0)
        dimension = argument(call, 1, "dim", -1)
        if _inner(data, dimension) > 1:
            return [_spatial_softmax(call, data, dimension, 3)]
        rows, columns = _rows(data, dimension)
        return [DeviceWork(call.name, (_softmax_record(kind, rows, columns, data, False),))]

    return lower


def _safe_softmax(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the softmax of attention as separate products: rows without finite scores, found and counted, are 0."""
    data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    empty = Tensor(-1, -1, data.shape, "bool", data.device)
    rows = Tensor(-1, -1, (*data.shape[:-1], 1), "bool", data.device)
    zero = Tensor(-1, -1, (), data.dtype, data.device)
    return [
        *_softmax("softmax")(call, context),
        elementwise(context, "eq", empty, [data], 1, "aten::isneginf"),
        reduction("all", empty, rows, context, "aten::all"),
        elementwise(context, "fill", zero, (), 1, "aten::fill_"),
        elementwise(context, "where", output, [rows, output], 1, "aten::where"),
    ]


def _softmax_backward(kind: str) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, 1)
        dimension = argument(call, 2, "dim", -1)
        if _inner(data, dimension) > 1:
            return [_spatial_softmax(call, data, dimension, 2)]
        rows, columns = _rows(data, dimension)
        work = DeviceWork(call.name, (_softmax_record(kind, rows, columns, data, True),))
        # SoftMax.cu multiplies gradient and output first, for a softmax without logarithm.
        product = elementwise(context, "mul", data, [data, data], 1, call.name)
        return [product, work] if kind == "softmax" else [work]

    return lower


def _inner(data: Tensor, dimension: Value) -> int:
    """Return the number of elements per step along ``dimension``: 1 for the last one."""
    place = dimension if isinstance(dimension, int) else -1
    return prod(data.shape[place % max(len(data.shape), 1) + 1 :])


def _spatial_softmax(call: OperatorCall, data: Tensor, dimension: Value, passes: int) -> DeviceWork:
    """Return the kernel of a softmax along another dimension than the last.

    Each thread walks a column three times: forward for the maximum, the sum and the output, backward once over the
    gradient and once over gradient and output (SoftMax.cu, ``cunn_SpatialSoftMaxForward`` and
    ``cunn_SpatialSoftMaxBackward``).
    """
    work = DeviceWork(call.name, (Elementwise("spatial_softmax", numel(data), 3, 1, 0, priced_dtype(data)),))
    return _walking(work, data, dimension, passes)


def _softmax_record(kind: str, rows: int, columns: int, data: Tensor, backward: bool) -> Softmax:
    form = "log_softmax" if kind == "log_softmax" else "softmax"
    return Softmax(rows, columns, priced_dtype(data), "backward" if backward else "forward", form)  # type: ignore[arg-type]


def _classes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, classes) of scores (N, C) or (N, C, d1, ...)."""
    if len(shape) < 2:
        return 1, shape[0] if shape else 1
    rows = shape[0]
    for extent in shape[2:]:
        rows *= extent
    return rows, shape[1]


def _nll(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the loss, which reads one score per row only."""
    data = tensor_argument(call, 0)
    return [DeviceWork(call.name, (Loss("nll", *_classes(data.shape), priced_dtype(data)),))]


def _nll_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower its gradient: clears the gradient of all scores, then writes one per row."""
    data = tensor_argument(call, 1)
    rows, _ = _classes(data.shape)
    clear = elementwise(context, "fill", data, (), 1, "aten::zero_", auxiliary=True)
    return [clear, DeviceWork(call.name, (Loss("nll", rows, 1, priced_dtype(data), "backward"),))]


def _pointwise_loss(kind: str) -> Lowering:
    """Return the lowering of ``mse_loss`` and similar: an element-wise kernel, then a reduction unless all elements are
    returned.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
        work = [DeviceWork(call.name, (Loss(kind, numel(data), 1, priced_dtype(data)),))]
        if numel(output) != numel(data):
            work.append(reduction("mean", data, output, context, "aten::mean"))
        return work

    return lower


def _count(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``nonzero``: counts, copies the count to the host, then writes the indices."""
    data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    count = Tensor(-1, -1, (), "int64", data.device)
    found = DeviceWork(call.name, (Reduction("count", numel(data), 1, priced_dtype(data)),))
    return [
        found,
        host_transfer(count, "device_to_host", "Memcpy DtoH", synchronizes=True),
        rearrangement("index", output, name=call.name),
    ]


def _isin(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``isin(elements, sought)`` for few sought values (tokens that end a text): pairwise comparison, then
    ``any``.

    For many values PyTorch sorts both, which is not supported here (``isin_Tensor_Tensor_out`` in TensorCompare.cpp,
    ``isin_default_kernel_gpu`` in TensorCompare.cu).
    """
    data, sought = tensor_argument(call, 0), tensor_argument(call, 1)
    if numel(sought) >= 10.0 * numel(data) ** 0.145:
        raise UnforeseenCall(f"{call.name}: of {numel(sought)} elements")
    output = gpu_outputs(call)[0]
    compared = Tensor(-1, -1, (*data.shape, numel(sought)), "bool", data.device)
    return [
        elementwise(context, "fill", output, (), 1, "aten::fill_", auxiliary=True),
        elementwise(context, "eq", compared, (data, sought), 1, "aten::eq"),
        reduction("any", compared, output, context, "aten::any"),
        elementwise(context, "copy", output, (output,), 1, "aten::copy_"),
    ]


def _bincount(call: OperatorCall, context: Context) -> list[DeviceWork]:
    data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    return [memset(output), reduction("count", data, output, context, call.name)]


def _fourier(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_fft_c2c(input, dim, normalization, forward)`` and similar: cuFFT kernels per dimension, then the
    normalisation.

    The transformed dimensions must be the innermost in memory (``_exec_fft``). Half of a spectrum is as large as the
    real numbers.
    """
    data, output = tensor_argument(call, 0), gpu_outputs(call)[0]
    places = sorted(place % len(data.shape) for place in integers(argument(call, 1)))
    inner = all(place >= len(data.shape) - len(places) for place in places)
    work = [] if inner else [rearrangement("transpose", data, name="aten::clone")]
    larger = max(data, output, key=size_bytes)
    dtype = "float64" if larger.dtype in ("complex128", "float64") else "float32"
    numbers = size_bytes(larger) // DTYPE_BYTES["float32"]
    for place in reversed(places):
        passes, growth = _fourier_passes(max(data.shape[place], output.shape[place]))
        work += [DeviceWork(call.name, (Elementwise("fft", round(numbers * growth), dtype=dtype),))] * passes
    if argument(call, 2):
        work.append(elementwise(context, "mul", output, [output], 1, "aten::mul_"))
    return work


def _fourier_passes(length: int) -> tuple[int, float]:
    """Return the number of kernels of a transform of ``length`` points, and the growth factor of its data.

    One kernel if the points fit into shared memory. Lengths with prime factors above 127 are convolutions of twice the
    length (Bluestein's algorithm, by cuFFT's documentation), a transform and its inverse.
    """
    rest = length
    for prime in range(2, _FOURIER_PRIME + 1):
        while rest % prime == 0:
            rest //= prime
    if rest > 1:
        padded = 1 << (2 * length - 1).bit_length()
        return 2 * _fourier_passes(padded)[0], padded / length
    return max(ceil(log(max(length, 2), _FOURIER_POINTS)), 1), 1.0


TABLE: dict[str, Lowering] = {
    **dict.fromkeys(("aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r"), _fourier),
    **{f"aten::{name}": _reduce(name) for name in REDUCTIONS},
    **{f"aten::{name}": _scan for name in SCANS},
    "aten::sort": _sort,
    "aten::argsort": _sort,
    "aten::topk": _sort,
    "aten::_softmax": _softmax("softmax"),
    "aten::softmax": _softmax("softmax"),
    "aten::_safe_softmax": _safe_softmax,
    "aten::_log_softmax": _softmax("log_softmax"),
    "aten::log_softmax": _softmax("log_softmax"),
    "aten::_softmax_backward_data": _softmax_backward("softmax"),
    "aten::_log_softmax_backward_data": _softmax_backward("log_softmax"),
    "aten::nll_loss_forward": _nll,
    "aten::nll_loss2d_forward": _nll,
    "aten::nll_loss_backward": _nll_backward,
    "aten::nll_loss2d_backward": _nll_backward,
    "aten::mse_loss": _pointwise_loss("mse"),
    "aten::smooth_l1_loss": _pointwise_loss("mse"),
    "aten::huber_loss": _pointwise_loss("mse"),
    "aten::l1_loss": _pointwise_loss("mse"),
    "aten::binary_cross_entropy": _pointwise_loss("bce"),
    "aten::nonzero": _count,
    "aten::isin": _isin,
    "aten::bincount": _bincount,
    "aten::histc": _bincount,
}
