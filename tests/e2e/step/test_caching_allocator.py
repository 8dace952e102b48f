"""PyTorch's allocator as simulated: sizes of segments, the block that is taken, what is put together again."""

from __future__ import annotations

import random

import pytest

from e2e.step.memory import CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (9 * MIB, 9 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (29 * MIB + 1, 30 * MIB, 30 * MIB),
    ],
)
def test_segments_of_a_first_allocation(size: int, allocated: int, reserved: int) -> None:
    """Constants of CUDACachingAllocator.cpp."""
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


def test_a_rest_of_a_large_block_that_is_not_worth_a_split_counts_as_allocated() -> None:
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB + 512 * KIB)
    assert allocator.allocated == 12 * MIB == allocator.reserved


def test_the_smallest_block_that_fits_is_taken_and_what_is_freed_is_joined() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.release(block)
    assert allocator.reserved == 90 * MIB and allocator.allocated == 0
    taken = allocator.allocate(18 * MIB)  # of the 20
    allocator.allocate(30 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 90 * MIB
    allocator.release(taken)
    allocator.allocate(20 * MIB)  # the 18 and the rest of 2 are one again
    assert allocator.reserved == 90 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.most_reserved == 110 * MIB


def test_a_split_segment_does_not_serve_what_is_as_large_as_it_was() -> None:
    """Fragmentation: 30 of 40 MiB are free, but not together with other segments' free blocks."""
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(40 * MIB))
    allocator.allocate(10 * MIB)
    allocator.allocate(40 * MIB)
    assert allocator.reserved == 80 * MIB


def test_streams_share_no_blocks() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(40 * MIB))
    allocator.allocate(40 * MIB, stream=1)
    assert allocator.reserved == 80 * MIB


def test_expandable_segments_grow_by_what_is_missing() -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(40 * MIB)
    second = allocator.allocate(20 * MIB)
    allocator.release(second)
    allocator.allocate(50 * MIB)  # the free 20 at the end, and 40 more
    assert allocator.reserved == 100 * MIB and allocator.allocated == 90 * MIB
    allocator.release(first)
    allocator.allocate(45 * MIB)  # 40 free in front are too small, 10 at the end are free
    assert allocator.reserved == 140 * MIB


def test_expandable_segments_split_off_every_rest_and_spare_the_end_that_can_grow() -> None:
    """``should_split`` and ``get_free_block``: the free end counts as large as the segment may become."""
    allocator = CachingAllocator(expandable=True)
    allocator.release(allocator.allocate(11 * MIB + 512))
    allocator.allocate(11 * MIB)
    assert allocator.allocated == 11 * MIB and allocator.reserved == 20 * MIB
    allocator = CachingAllocator(expandable=True)
    first, _, last = (allocator.allocate(size * MIB) for size in (50, 20, 30))
    allocator.release(last)
    allocator.release(first)
    assert allocator.allocate(25 * MIB).address == first.address, "the end has 30 free and is nearer in size"
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 120 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_books_are_kept_over_many_random_allocations(expandable: bool) -> None:
    chance, allocator, held = random.Random(7), CachingAllocator(expandable), []
    for _ in range(3000):
        if held and chance.random() < 0.5:
            allocator.release(held.pop(chance.randrange(len(held))))
        else:
            held.append(allocator.allocate(int(10 ** chance.uniform(2, 8.5)), chance.randrange(2)))
        assert allocator.allocated == sum(block.size for block in held) <= allocator.reserved
        spans = sorted((block.address, block.address + block.size) for block in held)
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    for block in held:
        allocator.release(block)
    free = sum(size for pool in allocator._free.values() for size, _ in pool)
    assert allocator.allocated == 0 and free == allocator.reserved == allocator.most_reserved
