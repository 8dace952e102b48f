"""Choices of parallel tasks: a few per thread, with little imbalance and little repeated work."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.contract.cpu_target import CpuTarget

# Limit of total work relative to the work without overlap of tiles and groups; splits beyond it are dropped.
_MAX_WASTE = 1.25
# Below this number of flops a parallel region may cost more than it saves.
_SMALL_FLOPS = 4_000_000


def task_splits(first: int, second: int, cpu: CpuTarget, small: bool = False) -> Iterator[tuple[int, int]]:
    """Yield parallel tasks along two axes of ``first`` and ``second`` units: a few per thread, with little imbalance.

    With fewer units than threads, as many tasks as possible. ``small``: a single task is one of the choices.
    """
    counts = sorted({factor * cpu.threads for factor in (1, 2, 4)} | ({1} if small or cpu.threads == 1 else set()))
    found = []
    for total in counts:
        for left in range(1, total + 1):
            right = total // left
            if left * right == total and left <= first and right <= second:
                waste = (-(-first // left) * left / first) * (-(-second // right) * right / second)
                found.append((waste, left, right))
    if first * second < cpu.threads:
        found.append((1.0, first, second))
    found = found or [(1.0, *_most_tasks(first, second, cpu.threads))]
    limit = max(_MAX_WASTE, min(found)[0])
    yield from dict.fromkeys((left, right) for waste, left, right in found if waste <= limit)


def _most_tasks(first: int, second: int, threads: int) -> tuple[int, int]:
    """Return the split with the most tasks, at most ``threads``."""
    splits = ((left, min(second, threads // left)) for left in range(1, min(first, threads) + 1))
    return max(splits, key=lambda split: split[0] * split[1])


def is_small(flops: int) -> bool:
    """True if the work is so small that a parallel region may cost more than it saves."""
    return flops < _SMALL_FLOPS
