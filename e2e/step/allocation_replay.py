"""Allocations replayed through PyTorch's caching allocator: what is in use at the fullest moment, and what for.

Who replays says which blocks are taken and given back, in which order: of a pipeline stage
:mod:`e2e.parallelism.stage_memory`, of a captured step :mod:`e2e.step.replayed_memory`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from e2e.step.caching_allocator import CachingAllocator
from e2e.step.memory import ROLES, MemoryMoment, MemoryUsage, Role

# What PyTorch allocates for each cuBLAS handle and stream that has products (aten/src/ATen/cuda/CublasHandlePool.cpp):
# on Hopper and datacenter Blackwell, and on other GPUs (two pieces of 4 MiB, eight of 16 KiB).
_LARGE_WORKSPACE, _WORKSPACE = 32 << 20, 2 * (4 << 20) + 8 * (16 << 10)


def workspace_bytes(architecture: str) -> int:
    """Bytes of a workspace of cuBLAS on GPUs of ``architecture``."""
    return _LARGE_WORKSPACE if architecture in ("hopper", "blackwell") else _WORKSPACE


class AllocationReplay:
    """Blocks of an allocator by key, and what they are for. ``expandable``: as with its setting of that name.

    ``moment``: what is going on, a number and a name, for whoever asks what the fullest one was.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.allocator = CachingAllocator(expandable)
        self.blocks: dict[Hashable, tuple[Any, Role]] = {}
        self.levels: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self.moment = self.fullest = (-1, "")
        self.peak, self.at_peak = 0, dict(self.levels)
        self.course: list[MemoryMoment] = []

    def take(self, key: Hashable, size: float, role: Role, stream: int = 0) -> None:
        """Allocates ``size`` bytes; nothing where that is none, or where ``key`` is there already."""
        if size < 1 or key in self.blocks:
            return
        block = self.allocator.allocate(int(size), stream)
        self.blocks[key] = block, role
        self.levels[role] += block.size
        if self.allocator.allocated > self.peak:
            self.peak, self.at_peak, self.fullest = self.allocator.allocated, dict(self.levels), self.moment

    def drop(self, key: Hashable) -> None:
        """Frees what is there by ``key``."""
        held = self.blocks.pop(key, None)
        if held is not None:
            self.levels[held[1]] -= held[0].size
            self.allocator.release(held[0])

    def note(self) -> None:
        """Adds what is in use now to the course of the step."""
        self.course.append(MemoryMoment(self.moment[0], tuple(self.levels.values())))

    def usage(self) -> MemoryUsage:
        """The fullest moment, and what the allocator took at most."""
        most = max(self.allocator.most_reserved, self.peak)
        breakdown = {**self.at_peak, "reserve": most - self.peak}
        return MemoryUsage(most, breakdown, *self.fullest, course=tuple(self.course))
