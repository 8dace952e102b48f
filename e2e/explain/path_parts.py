"""A critical path in few lines, and the families of tasks whose errors are alike."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from e2e.explain.critical_path import CriticalPath, Segment
from e2e.explain.prediction import PathPart
from e2e.step.execution_graph import Kernel, Task

PATH_PARTS = 40


def task_family(task: Task | Kernel) -> str:
    """The type of a task's first record, or its kind."""
    if task.operators:
        return type(task.operators[0]).__name__
    collective = task.collective if isinstance(task, Task) else None
    return collective.kind if collective is not None else task.kind


def path_parts(path: CriticalPath) -> tuple[PathPart, ...]:
    """The path by kind and name, the longest first; what is left is one part, so that all of them sum to the step."""
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
