"""Products in 8 bits with scales, and casts: PyTorch's operators and those of :mod:`e2e.capture.models.layer_forms`."""

from __future__ import annotations

from math import prod

from costmodel.operators.device_work import SCALINGS, Elementwise, ScaledCast, ScaledGemm
from costmodel.operators.experts import GroupedGemm
from e2e.lowering.families.products import by_expert, experts_product, grouped
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    dtype_of,
    gpu_outputs,
    numel,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor


def _scaling_of(scale: Tensor, operand: Tensor) -> str:
    """Return the granularity of scaling from the number of scales of the operand (rows, k)."""
    scales, elements, rows = numel(scale), numel(operand), operand.shape[-2]
    if scales <= 1:
        return "tensor"
    if scales in (rows, operand.shape[-1]):
        return "row"
    return "mx" if elements // scales <= 32 else "block"


# Index of ``use_fast_accum`` in the arguments of ``_scaled_mm``; PyTorch's default is False.
_FAST_ACCUM = 7


def _scaled(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_scaled_mm(a, b, scale_a, scale_b, ...)``."""
    first, second, scale = (tensor_argument(call, place) for place in range(3))
    record = ScaledGemm(
        first.shape[-2],
        second.shape[-1],
        first.shape[-1],
        dtype_of(first),
        _scaling_of(scale, first),
        dtype_of(gpu_outputs(call)[0]),
        split_sums=call.inputs[_FAST_ACCUM : _FAST_ACCUM + 1] != (True,),
    )
    return [DeviceWork(call.name, (record,))]


def _integers(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_int_mm(a, b)``, with sums in int32."""
    first, second = tensor_argument(call, 0), tensor_argument(call, 1)
    record = ScaledGemm(first.shape[-2], second.shape[-1], first.shape[-1], "int8", "tensor", "int32")
    return [DeviceWork(call.name, (record,))]


def _scaled_groups(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_scaled_grouped_mm(a, b, scale_a, scale_b, offs, ...)``."""
    first, second, scale = (tensor_argument(call, place) for place in range(3))
    groups = next((each.shape[0] for each in (second, first, gpu_outputs(call)[0]) if len(each.shape) == 3), 0)
    if not groups:
        raise UnforeseenCall("the number of groups is not known")
    scaling = _scaling_of(scale, first)
    record: GroupedGemm = grouped(first, second, groups, dtype_of(first), context, scaling)
    return [DeviceWork(call.name, (record,))]


def _cast(dynamic: bool, outputs: int | None = None) -> Lowering:
    """Return the lowering of ``float8::cast(given, scaling, ...)``; rows are along the last dimension."""

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        given = tensor_argument(call, 0)
        count = len(gpu_outputs(call)) if outputs is None else outputs
        scaling = _named(call)
        columns = given.shape[-1]
        share = next((value for value in call.inputs[1:] if isinstance(value, int)), 1)
        rows = max(prod(given.shape) // columns // share, 1)
        found = dynamic and scaling != "tensor"
        record = ScaledCast(rows, columns, dtype_of(given), scaling, count, found)
        return [DeviceWork(call.name, (record,))]

    return lower


def _product(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::mm``, which names its scaling."""
    first, second = tensor_argument(call, 0), tensor_argument(call, 1)
    output = gpu_outputs(call)[0]
    (m, k), n = first.shape, second.shape[1]
    record = ScaledGemm(m, n, k, "float8", _named(call), dtype_of(output), split_sums=_splits_sums(call))
    return [DeviceWork(call.name, (record,))]


def _amax(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::amax``: the maximum, and the scale from it, on the GPU (``nvte_compute_amax``,
    ``nvte_compute_scale_from_amax``; torchao divides in separate kernels too).
    """
    return [*_cast(False, 0)(call, context), DeviceWork(call.name, (_SCALE,))]


_SCALE = Elementwise("scale", 1, 1, 1, 0, "float32")


def _each_cast(searched: bool) -> Lowering:
    """Return the lowering of ``float8::each_amax`` or ``float8::each_cast``: the kernels of :func:`_amax` or of a cast,
    per expert.
    """

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        given, ends = tensor_argument(call, 0), tensor_argument(call, 1)
        counts = context.options.routing.counts(given.shape[0], ends.shape[0])
        scaling = _named(call)
        outputs = 0 if searched else len(gpu_outputs(call))
        works: list[DeviceWork] = []
        for rows in counts:
            dynamic = not searched and scaling != "tensor"
            record = ScaledCast(rows, given.shape[-1], dtype_of(given), scaling, outputs, dynamic)
            works.append(DeviceWork(call.name, (record,)))
            if searched:
                works.append(DeviceWork(call.name, (_SCALE,)))
        return works

    return lower


def _experts(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::grouped_mm`` and ``float8::grouped_gradient``."""
    return [DeviceWork(call.name, (experts_product(call, context, "float8", _named(call)),))]


def _each_expert(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``float8::each_mm`` and ``float8::each_gradient``: one kernel per expert."""
    work = experts_product(call, context, "float8", _named(call))
    dtype = dtype_of(gpu_outputs(call)[0])
    split_sums = work.wrt == "weight" or _splits_sums(call)
    products = [
        ScaledGemm(m, n, k, "float8", work.scaling, dtype, split_sums=split_sums) for m, n, k in by_expert(work)
    ]
    return [DeviceWork(call.name, (product,)) for product in products]


def _splits_sums(call: OperatorCall) -> bool:
    return any(value is True for value in call.inputs)


def _named(call: OperatorCall) -> str:
    return next((str(value) for value in call.inputs if value in SCALINGS), "tensor")


TABLE: dict[str, Lowering] = {
    "aten::_scaled_mm": _scaled,
    "aten::_int_mm": _integers,
    "aten::_scaled_grouped_mm": _scaled_groups,
    "float8::amax": _amax,
    "float8::each_amax": _each_cast(True),
    "float8::each_cast": _each_cast(False),
    "float8::each_cast_both": _each_cast(False),
    "float8::each_mm": _each_expert,
    "float8::each_gradient": _each_expert,
    "float8::cast": _cast(True),
    "float8::cast_both": _cast(True),
    "float8::mm": _product,
    "float8::grouped_mm": _experts,
    "float8::grouped_gradient": _experts,
}
