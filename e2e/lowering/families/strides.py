"""Memory layout of operands relative to an output written in order."""

from __future__ import annotations

from collections.abc import Sequence

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
