"""How operands lie in memory beside the result that a kernel writes in order."""

from __future__ import annotations

from collections.abc import Sequence

SECTOR_BYTES = 32  # what DRAM delivers at least (CUDA C++ Best Practices Guide, coalesced access)


def strided_reads(
    shape: Sequence[int], result: Sequence[int], operand: Sequence[int], element_bytes: int
) -> tuple[float, int]:
    """Share of a full-size operand's elements that lie in a sector of their own for the threads that read them, and the
    bytes of other sectors that are touched before the next element of such a sector is read.

    ``result``, ``operand``: strides in elements. Threads follow the result, along its smallest stride.
    """
    order = sorted((dim for dim, extent in enumerate(shape) if extent > 1), key=lambda dim: result[dim])
    if not order:
        return 0.0, 0
    step = operand[order[0]] * element_bytes
    if step <= element_bytes:
        return 0.0, 0
    share = min(1.0, (step - element_bytes) / (SECTOR_BYTES - element_bytes))
    near = [dim for dim in order if 0 < operand[dim] * element_bytes < SECTOR_BYTES]
    # The next element in the sector comes one step further along the first such dimension of the result.
    return share, (result[near[0]] if near else 0) * SECTOR_BYTES


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a batch of images lies in memory as NHWC; where extents of one leave it open, PyTorch's own answer
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
    """Whether a tensor lies row by row without gaps, as NHWC if ``channels_last``; extents of one do not matter."""
    order = (0, 2, 3, 1) if channels_last and len(shape) == 4 else tuple(range(len(shape)))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != step:
            return False
        step *= shape[dim]
    return True
