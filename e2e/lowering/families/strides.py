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
