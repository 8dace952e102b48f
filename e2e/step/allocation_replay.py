"""Replay of allocations through PyTorch's caching allocator: memory in use at the peak, by role.

The caller decides the order of allocations and frees: :mod:`e2e.parallelism.stage_memory` for a pipeline stage,
:mod:`e2e.step.replayed_memory` for a captured step.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from e2e.step.caching_allocator import CachingAllocator
from e2e.step.memory import ROLES, MemoryMoment, MemoryUsage, Role

# cuBLAS workspace per handle and stream that runs matrix products (aten/src/ATen/cuda/CublasHandlePool.cpp): on Hopper
# and datacenter Blackwell, and on other GPUs (two pieces of 4 MiB, eight of 16 KiB).
_LARGE_WORKSPACE, _WORKSPACE = 32 << 20, 2 * (4 << 20) + 8 * (16 << 10)


def workspace_bytes(architecture: str) -> int:
    """Size of a cuBLAS workspace in bytes on GPUs of ``architecture``."""
    return _LARGE_WORKSPACE if architecture in ("hopper", "blackwell") else _WORKSPACE


class AllocationReplay:
    """Allocated blocks by key, each with its role.

    ``expandable``: the allocator setting ``expandable_segments``. ``moment``: current call number and name, recorded as
    ``fullest`` when a new peak is reached.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.allocator = CachingAllocator(expandable)
        self.blocks: dict[Hashable, tuple[Any, Role]] = {}
        self.levels: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self.moment = self.fullest = (-1, "")
        self.peak, self.at_peak = 0, dict(self.levels)
        self.course: list[MemoryMoment] = []

    def take(self, key: Hashable, size: float, role: Role, stream: int = 0) -> None:
        """Allocate ``size`` bytes; do nothing if the size is zero or ``key`` is already allocated."""
        if size < 1 or key in self.blocks:
            return
        block = self.allocator.allocate(int(size), stream)
        self.blocks[key] = block, role
        self.levels[role] += block.size
        if self.allocator.allocated > self.peak:
            self.peak, self.at_peak, self.fullest = self.allocator.allocated, dict(self.levels), self.moment

    def drop(self, key: Hashable) -> None:
        """Free the block of ``key``, if there is one."""
        held = self.blocks.pop(key, None)
        if held is not None:
            self.levels[held[1]] -= held[0].size
            self.allocator.release(held[0])

    def note(self) -> None:
        """Append the current memory levels to the course of the step."""
        self.course.append(MemoryMoment(self.moment[0], tuple(self.levels.values())))

    def usage(self) -> MemoryUsage:
        """Return the peak with its breakdown and the most memory the allocator reserved."""
        most = max(self.allocator.most_reserved, self.peak)
        breakdown = {**self.at_peak, "reserve": most - self.peak}
        return MemoryUsage(most, breakdown, *self.fullest, course=tuple(self.course))
