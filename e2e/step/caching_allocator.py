"""Simulation of PyTorch's caching allocator of GPU memory: memory reserved from the driver for a sequence of
allocations.

Rules of c10/cuda/CUDACachingAllocator.cpp with its default settings. Sizes are rounded up to 512 bytes. Blocks of at
most 1 MiB come from segments of 2 MiB, larger ones from segments of 20 MiB or, from 10 MiB on, from a segment of their
own size rounded up to 2 MiB. Each stream has its own blocks. The smallest free block that is large enough is used, at
the lowest address if several match, and split if the remainder is large enough. Freed blocks are merged with their free
neighbours; no segment is returned while the driver has free memory. With ``expandable_segments:True`` each stream has
one segment for small and one for large blocks, which grows at its end; every remainder of 512 bytes is split off, and
the free end counts as large as it can grow, so that an earlier free block is preferred (``should_split``,
``get_free_block``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

# Smallest unit (kMinBlockSize).
BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20  # kSmallSize
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # kLargeBuffer
OWN_SEGMENT_FROM = 10 << 20  # kMinLargeAlloc
ROUNDED_TO = 2 << 20  # kRoundLarge


def whole_blocks(size: int) -> int:
    """Round ``size`` in bytes up to the allocator's unit."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(eq=False, slots=True)
class _Block:
    """Block of a segment, linked with its neighbours in the segment."""

    address: int
    size: int
    pool: tuple[int, bool]
    free: bool = False
    before: _Block | None = None
    behind: _Block | None = None


class CachingAllocator:
    """Simulated allocator.

    ``allocated`` and ``reserved``: current bytes; ``most_reserved``: peak of ``reserved``. ``expandable``: the
    allocator setting ``expandable_segments``.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self._ends: dict[tuple[int, bool], _Block] = {}  # last block of each expandable segment
        self.allocated = self.reserved = self.most_reserved = 0
        self._next = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, _Block] = {}  # free blocks by address

    def allocate(self, size: int, stream: int = 0) -> _Block:
        """Return a block for ``size`` bytes on ``stream``, to be freed by :meth:`release`."""
        size = max(whole_blocks(size), BLOCK_BYTES)
        pool = (stream, size <= SMALL_BYTES)
        block = self._best(pool, size) or self._segment(pool, size)
        rest = block.size - size
        if rest >= BLOCK_BYTES if pool[1] or self.expandable else rest > SMALL_BYTES:
            self._split(block, size)
        self.allocated += block.size
        return block

    def release(self, block: _Block) -> None:
        """Free ``block`` and merge it with its free neighbours."""
        self.allocated -= block.size
        before, behind = block.before, block.behind
        if before is not None and before.free:
            self._take(before)
            before.size += block.size
            before.behind = behind
            if behind is not None:
                behind.before = before
            if self._ends.get(block.pool) is block:
                self._ends[block.pool] = before
            block = before
        if behind is not None and behind.free:
            self._take(behind)
            if self._ends.get(block.pool) is behind:
                self._ends[block.pool] = block
            block.size += behind.size
            block.behind = behind.behind
            if block.behind is not None:
                block.behind.before = block
        self._give(block)

    def _best(self, pool: tuple[int, bool], size: int) -> _Block | None:
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        block = self._blocks[free[place][1]]
        if block is self._ends.get(pool) and place + 1 < len(free):
            block = self._blocks[free[place + 1][1]]
        self._take(block)
        return block

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if self.expandable:
            return self._grown(pool, size)
        if pool[1]:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // ROUNDED_TO) * ROUNDED_TO
        block = _Block(self._next, whole, pool)
        self._next += whole
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _grown(self, pool: tuple[int, bool], size: int) -> _Block:
        """Return a free block at the end of the stream's segment, grown by as many pages as ``size`` needs."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        end = self._ends.get(pool)
        free = end if end is not None and end.free else None
        missing = -(-(size - (free.size if free is not None else 0)) // page) * page
        self.reserved += missing
        self.most_reserved = max(self.most_reserved, self.reserved)
        if free is not None:
            self._take(free)
            free.size += missing
            return free
        address = end.address + end.size if end is not None else len(self._ends) << 50
        block = _Block(address, missing, pool, before=end)
        if end is not None:
            end.behind = block
        self._ends[pool] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool, before=block, behind=block.behind)
        if block.behind is not None:
            block.behind.before = rest
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        block.behind, block.size = rest, size
        self._give(rest)

    def _give(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free.setdefault(block.pool, []), (block.size, block.address))

    def _take(self, block: _Block) -> None:
        block.free = False
        del self._blocks[block.address]
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
