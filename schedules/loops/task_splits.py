"""Parallel tasks that templates choose from: a few per thread, little imbalance, little done twice."""

from __future__ import annotations

from collections.abc import Iterator

from schedules.contract.cpu_target import CpuTarget

# Work of overlapping tiles and groups that may be done twice before a split is dropped.
_MAX_WASTE = 1.25
# Flops under which a parallel region may cost more than it saves.
_SMALL_FLOPS = 4_000_000


def task_splits(first: int, second: int, cpu: CpuTarget, small: bool = False) -> Iterator[tuple[int, int]]:
    """Parallel tasks along two axes of ``first`` and ``second`` units: a few per thread, little imbalance.

    Where there are fewer units than threads, as many tasks as there can be. ``small``: a single task is one of them.
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
    """The split into most tasks that is none of more than ``threads``."""
    splits = ((left, min(second, threads // left)) for left in range(1, min(first, threads) + 1))
    return max(splits, key=lambda split: split[0] * split[1])


def is_small(flops: int) -> bool:
    """So little work that a parallel region may cost more than it saves."""
    return flops < _SMALL_FLOPS
