"""Where a step lies, from the intervals of what it consists of."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from e2e.critical_path import CriticalPath
from e2e.graph import ExecutionGraph, Task
from e2e.path_parts import task_family


def step_interval(
    graph: ExecutionGraph, path: CriticalPath, seconds: float, host_factor: float = 1.0
) -> tuple[float, float]:
    """Lowest and highest of a step of ``seconds``, by what is on its critical path.

    Kernels and collectives of one family err alike, families independently; so does the host, whose times may be
    ``host_factor`` times shorter or longer. What runs beside the path could err without changing the step.
    """
    tasks: Mapping[int, tuple[Task, ...]] = {rank.rank: rank.tasks for rank in graph.ranks}
    below: dict[str, float] = defaultdict(float)
    above: dict[str, float] = defaultdict(float)
    for segment in path.segments:
        task = None if segment.task is None else tasks[segment.rank][segment.task]
        if task is not None and task.duration is not None and task.duration.seconds > 0:
            share = segment.seconds / task.duration.seconds
            below[task_family(task)] += share * (task.duration.seconds - task.duration.lower)
            above[task_family(task)] += share * (task.duration.upper - task.duration.seconds)
    host = path.host_bound_fraction * path.seconds
    down = math.hypot(host * (1 - 1 / host_factor), *below.values())
    up = math.hypot(host * (host_factor - 1), *above.values())
    return max(0.0, seconds - down), seconds + up
