"""Memory that a run of a compiled module takes, read from the module after its memory is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from schedules.contract.cpu_target import CpuTarget


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one network in bytes."""

    # Storage of intermediates and outputs, which a run holds until it ends: the peak, without inputs.
    activation_bytes: int
    # Constants, each counted once.
    weight_bytes: int
    # Tile buffers inside kernels, of all threads of the kernel with the largest.
    scratch_bytes: int


def activation_bytes(mod: tvm.IRModule, function: str = "main") -> int:
    """Return the bytes of all storage that ``function`` allocates, after ``StaticPlanBlockMemory`` and
    ``LowerAllocTensor``.

    The virtual machine keeps each allocation until the function returns; tensors that are never needed at the same time
    share one.
    """
    total = 0
    for block in mod[function].body.blocks:
        for binding in block.bindings:
            call = binding.value
            if isinstance(call, relax.Call) and getattr(call.op, "name", "") == "relax.memory.alloc_storage":
                sizes = list(call.args[0].values)
                if all(isinstance(size, tirx.IntImm) for size in sizes):  # else the size depends on the data
                    total += math.prod(int(size) for size in sizes)
    return total


def weight_bytes(mod: tvm.IRModule, function: str = "main") -> int:
    """Return the bytes of the constants of ``function``."""
    seen: dict[Any, int] = {}

    def visit(expression: relax.Expr) -> None:
        if isinstance(expression, tvm.ir.GenericConst) and hasattr(expression.value, "shape"):
            tensor = expression.value
            seen[tensor] = math.prod(tensor.shape) * _itemsize(str(tensor.dtype))

    relax.analysis.post_order_visit(mod[function], visit)
    return sum(seen.values())


def scratch_bytes(mod: tvm.IRModule, cpu: CpuTarget) -> int:
    """Return the bytes of the tile buffers of the kernel with the most, one set per thread; registers are
    not counted.
    """
    most = 0
    for function in mod.functions.values():
        if isinstance(function, tirx.PrimFunc):
            most = max(most, _buffers(function))
    return cpu.threads * most


def _buffers(function: tirx.PrimFunc) -> int:
    total = 0
    left: list[Any] = [function.body]
    while left:
        statement = left.pop()
        if isinstance(statement, tirx.AllocBuffer) and statement.buffer.scope() != "local":
            extents = statement.buffer.shape
            if all(isinstance(extent, tirx.IntImm) for extent in extents):
                total += math.prod(int(extent) for extent in extents) * _itemsize(str(statement.buffer.dtype))
        left.extend(getattr(statement, "seq", ()))
        inner = (getattr(statement, name, None) for name in ("body", "then_case", "else_case", "block"))
        left.extend(each for each in inner if each is not None)
    return total


def _itemsize(dtype: str) -> int:
    try:
        return np.dtype(dtype).itemsize
    except TypeError:  # bfloat16 and other types that NumPy lacks
        return -(-int(tvm.DataType(dtype).bits) // 8)
