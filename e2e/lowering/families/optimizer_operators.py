"""Foreach and fused optimizer kernels: number of launches for a list of tensors, and bytes moved by each.

The split into launches is that of ``multi_tensor_apply`` (aten/src/ATen/native/cuda/MultiTensorApply.cuh): chunks of
65,536 elements, at most 320 blocks, and at most as many tensors as fit into the kernel's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from costmodel.operators.device_work import OptimizerStep
from costmodel.operators.layers import DTYPE_BYTES
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    elementwise,
    gpu_outputs,
    is_on_gpu,
    numel,
    priced_dtype,
)
from e2e.step.operator_trace import OperatorCall, Tensor, tensors

CHUNK_ELEMENTS = 65536
MAX_BLOCKS = 320
# Number of lists in the kernel's arguments -> tensors per launch; the second table is for one scalar per tensor.
MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
MAX_TENSORS_WITH_SCALARS = {1: 96, 2: 64, 3: 48, 4: 36, 5: 30}


def list_launches(tensor_list: Sequence[Tensor], max_tensors: int) -> Iterator[tuple[int, int]]:
    """Iterate over (elements, tensors) of the launches over ``tensor_list``."""
    blocks = elements = count = 0
    for tensor in tensor_list:
        left = numel(tensor)
        if left == 0:
            continue
        count += 1
        while left > 0:
            step = min(left, CHUNK_ELEMENTS)
            left -= step
            elements += step
            blocks += 1
            if blocks == MAX_BLOCKS or (count == max_tensors and left == 0):
                yield elements, count
                blocks = elements = 0
                # A tensor split between two launches is the first one of the next launch.
                count = 1 if left else 0
    if blocks:
        yield elements, count


def _lists(call: OperatorCall) -> list[tuple[Tensor, ...]]:
    """Return the lists of GPU tensors among the arguments."""
    lists = []
    for value in call.inputs:
        if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
            members = tuple(tensors(value))
            if is_on_gpu(members[0]):
                lists.append(members)
    return lists


def _has_scalar_list(call: OperatorCall) -> bool:
    numbers = [value for value in call.inputs if isinstance(value, tuple) and value]
    return any(isinstance(value[0], (int, float)) and not isinstance(value[0], bool) for value in numbers)


def _foreach(name: str) -> Lowering:
    """Return the lowering of an element-wise operator over lists: the first list is also written if in place, otherwise
    a new list.
    """
    kind = f"foreach_{name.rstrip('_')}"

    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        lists = _lists(call)
        if not lists:
            return []
        depth = len(lists) + (0 if name.endswith("_") else 1)
        limits = MAX_TENSORS_WITH_SCALARS if _has_scalar_list(call) else MAX_TENSORS
        dtype = priced_dtype(lists[0][0])
        reads = 0 if name == "zero_" else len(lists) - (1 if name == "copy_" else 0)
        return [
            DeviceWork(call.name, (OptimizerStep(kind, elements, count, reads, 1, dtype),))
            for elements, count in list_launches(lists[0], limits[min(depth, 5)])
        ]

    return lower


def _foreach_norm(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower ``_foreach_norm``: partial norms by chunk, then a clean-up kernel per list."""
    lists = _lists(call)
    if not lists:
        return []
    dtype = priced_dtype(lists[0][0])
    work = [
        DeviceWork(call.name, (OptimizerStep("foreach_norm", elements, count, 1, 0, dtype),))
        for elements, count in list_launches(lists[0], MAX_TENSORS[1])
    ]
    return [*work, DeviceWork(call.name, (OptimizerStep("foreach_norm", len(lists[0]), len(lists[0]), 1, 1, dtype),))]


# Fused optimizer -> (kind, reads, writes) in lists with the parameters' shape.
FUSED = {
    "aten::_fused_adam_": ("adam", 4, 3),
    "aten::_fused_adamw_": ("adamw", 4, 3),
    "aten::_fused_adagrad_": ("adagrad", 3, 2),
    "aten::_fused_sgd_": ("sgd", 2, 1),
}


def _fused(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a fused optimizer: parameters, gradients and state in one kernel; empty lists (no momentum, no amsgrad) are
    skipped.
    """
    kind, reads, writes = FUSED[call.name]
    lists = [group for group in _lists(call) if numel(group[0]) == numel(_lists(call)[0][0])]
    shapes = [tensor.shape for tensor in lists[0]]
    alike = [group for group in lists if [tensor.shape for tensor in group] == shapes]
    depth, dtype = len(alike), priced_dtype(lists[0][0])
    # Wider states than parameters, as Apex keeps them, count as several lists; they are read and written.
    wider = sum(DTYPE_BYTES[priced_dtype(group[0])] // DTYPE_BYTES[dtype] - 1 for group in alike)
    extra = max(depth - reads, 0) + max(wider, 0)
    return [
        DeviceWork(call.name, (OptimizerStep(kind, elements, count, reads + extra, writes + extra, dtype),))
        for elements, count in list_launches(lists[0], MAX_TENSORS[min(depth, 5)])
    ]


def _unscale(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the unscaling of gradients by the loss scale with the overflow check, in place."""
    lists = _lists(call)
    dtype = priced_dtype(lists[0][0])
    return [
        DeviceWork(call.name, (OptimizerStep("foreach_mul", elements, count, 1, 1, dtype),))
        for elements, count in list_launches(lists[0], MAX_TENSORS[1])
    ]


def _update_scale(call: OperatorCall, context: Context) -> list[DeviceWork]:
    return [elementwise(context, "scale", gpu_outputs(call)[0], list(tensors(call.inputs)), name=call.name)]


NAMES = ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp", "sqrt", "neg", "reciprocal", "abs", "exp", "sign")
MORE_NAMES = ("maximum", "minimum", "pow", "clamp_min", "clamp_max", "rsqrt", "log", "sigmoid", "tanh", "round")

TABLE: dict[str, Lowering] = {
    **{f"aten::_foreach_{name}{form}": _foreach(f"{name}{form}") for name in NAMES + MORE_NAMES for form in ("", "_")},
    "aten::_foreach_zero_": _foreach("zero_"),
    "aten::_foreach_copy_": _foreach("copy_"),
    "aten::_foreach_norm": _foreach_norm,
    **dict.fromkeys(FUSED, _fused),
    "aten::_amp_foreach_non_finite_check_and_unscale_": _unscale,
    "aten::_amp_update_scale_": _update_scale,
}
