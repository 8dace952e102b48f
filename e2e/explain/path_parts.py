"""Summary of a critical path, and the task families whose errors are correlated."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from e2e.explain.critical_path import CriticalPath, Segment
from e2e.step.execution_graph import Kernel, Task

PATH_PARTS = 40


@dataclass(frozen=True)
class PathPart:
    """Part of the critical path: all segments of one ``kind`` and ``name``."""

    kind: str
    name: str
    seconds: float
    count: int
    # What the segments mostly waited for.
    waits_for: str


# Tensor-core operators: their errors depend on the number type and, in experts, on the rows of each expert.
_PRODUCTS = ("Gemm", "Attention", "ScaledGemm")
_SHORT = ("bfloat16", "float16")
_OF_EXPERTS = ("moe::", "float8::each", "float8::grouped")


def task_family(task: Task | Kernel) -> str:
    """Family of a task: the type of its first record, or its kind.

    Matrix products and attention also have their number type, unless it has 16 bits, and whether they are of experts.
    """
    if task.operators:
        first = task.operators[0]
        name = type(first).__name__
        if name not in _PRODUCTS:
            return name
        dtype = getattr(first, "dtype", "")
        name += "" if dtype in _SHORT else f" in {dtype}"
        return f"{name} of experts" if task.name.startswith(_OF_EXPERTS) else name
    collective = task.collective if isinstance(task, Task) else None
    return collective.kind if collective is not None else task.kind


def path_parts(path: CriticalPath) -> tuple[PathPart, ...]:
    """Sum the path by kind and name, in descending order; the rest is one part, so that all parts sum to the step."""
    groups: dict[tuple[str, str], list[Segment]] = defaultdict(list)
    for segment in path.segments:
        groups[segment.kind, segment.operator or segment.name].append(segment)
    parts = sorted((_part(*key, segments) for key, segments in groups.items()), key=lambda part: -part.seconds)
    rest = parts[PATH_PARTS:]
    if rest:
        seconds = math.fsum(part.seconds for part in rest)
        parts = [*parts[:PATH_PARTS], PathPart("other", "all the rest", seconds, sum(part.count for part in rest), "")]
    return tuple(parts)


def _part(kind: str, name: str, segments: list[Segment]) -> PathPart:
    waits: Mapping[str, int] = Counter(segment.waits_for for segment in segments)
    most = max(waits, key=lambda each: waits[each])
    return PathPart(kind, name, math.fsum(segment.seconds for segment in segments), len(segments), most)
