"""Events (actions and tasks) per second of the simulator, from a priced graph to a finished timeline.

python -m lab.bench.simulator --events 1000000 --repeat 3
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import (
    Action,
    Await,
    Collective,
    Duration,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
    Task,
)

COMPUTE, COMMUNICATION = 7, 20
KERNELS_PER_LAYER = 8


@dataclass(frozen=True)
class Row:
    """Result of one case. ``seconds``: of the fastest run; ``median_seconds``: of the median run."""

    case: str
    ranks: int
    events: int
    seconds: float
    median_seconds: float
    events_per_second: float


def one_rank(events: int) -> ExecutionGraph:
    """Forward on the main thread, backward on autograd's, one stream, a synchronisation at the end."""
    # Per kernel: T2, launch, T3, T1 and the task.
    kernels = events // 5
    forward, rest = _Rank(0, 1), kernels // 3
    forward.kernels("main", rest)
    forward.add("main", Signal(0))
    forward.add("autograd", Await(0))
    forward.kernels("autograd", kernels - rest)
    forward.add("autograd", Signal(1))
    forward.add("main", Await(1))
    forward.add("main", Synchronize(duration=_seconds(1e-5)))
    return ExecutionGraph((forward.graph(),))


def data_parallel(events: int, ranks: int, groups: int = 1) -> ExecutionGraph:
    """Graph in which every layer's gradients are reduced over all ranks on a side stream, beside the backward of the
    next layers.

    With ``groups``, ranks are reduced in that many groups, whose transfers share links.
    """
    layers = events // ranks // (KERNELS_PER_LAYER * 5 + 9)
    return ExecutionGraph(tuple(_data_parallel_rank(rank, ranks, layers, groups) for rank in range(ranks)))


class _Rank:
    def __init__(self, rank: int, ranks: int, groups: int = 1) -> None:
        self.rank, self.ranks, self.groups = rank, ranks, groups
        self._threads: dict[str, list[Action]] = {}
        self._tasks: list[Task] = []

    def add(self, thread: str, action: Action) -> None:
        self._threads.setdefault(thread, []).append(action)

    def kernels(self, thread: str, count: int) -> None:
        for place in range(count):
            # Some are bound by the host, some by the device.
            seconds = (3 + (place * 7 + self.rank) % 11) * 1e-6
            self.add(thread, HostWork("T2", place, _seconds(2e-6)))
            self.launch(thread, Task(len(self._tasks), "kernel", "kernel", COMPUTE, duration=_seconds(seconds)))
            self.add(thread, HostWork("T3", place, _seconds(1e-6)))
            self.add(thread, HostWork("T1", place, _seconds(1e-6)))

    def all_reduce(self, thread: str, sequence: int) -> None:
        self.add(thread, RecordEvent(2 * sequence, COMPUTE))
        self.add(thread, StreamWait(2 * sequence, COMMUNICATION))
        size = self.ranks // self.groups
        first = self.rank // size * size
        collective = Collective("all_reduce", f"from {first}", _RANKS[first, size], sequence, 25 << 20)
        links = (("network", 0.5),) if self.groups > 1 else ()
        task = Task(
            len(self._tasks), "ncclAllReduce", "collective", COMMUNICATION, (), _seconds(4e-5), collective, links=links
        )
        self.add(thread, HostWork("T2", None, _seconds(2e-6)))
        self.launch(thread, task)
        self.add(thread, RecordEvent(2 * sequence + 1, COMMUNICATION))

    def launch(self, thread: str, task: Task) -> None:
        self._tasks.append(task)
        self.add(thread, Launch(task.id, _seconds(3e-6)))

    def graph(self) -> RankGraph:
        threads = {name: tuple(actions) for name, actions in self._threads.items()}
        return RankGraph(self.rank, threads, tuple(self._tasks))


def _data_parallel_rank(rank: int, ranks: int, layers: int, groups: int) -> RankGraph:
    made = _Rank(rank, ranks, groups)
    made.add("main", Signal(0))
    made.add("autograd", Await(0))
    for layer in range(layers):
        made.kernels("autograd", KERNELS_PER_LAYER)
        made.all_reduce("autograd", layer)
    made.add("autograd", Signal(1))
    made.add("main", Await(1))
    for layer in range(layers):
        made.add("main", StreamWait(2 * layer + 1, COMPUTE))
    made.kernels("main", 1)
    made.add("main", Synchronize(duration=_seconds(1e-5)))
    return made.graph()


class _Ranks(dict[tuple[int, int], tuple[int, ...]]):
    def __missing__(self, key: tuple[int, int]) -> tuple[int, ...]:
        first, count = key
        ranks = self[key] = tuple(range(first, first + count))
        return ranks


_RANKS = _Ranks()


def _seconds(value: float) -> Duration:
    return Duration.measured(value)


def _measure(case: str, make: Callable[[], ExecutionGraph], repeat: int) -> Row:
    graph = make()
    events = sum(sum(1 for _ in rank.actions()) + len(rank.tasks) for rank in graph.ranks)
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        simulate(graph)
        seconds.append(time.perf_counter() - begin)
    best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
    return Row(case, len(graph.ranks), events, best, median, events / best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="actions and tasks of each case")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    cases: dict[str, Callable[[], ExecutionGraph]] = {
        "one rank": lambda: one_rank(arguments.events),
        "8 ranks, overlapped all-reduce": lambda: data_parallel(arguments.events, 8),
        "64 ranks, overlapped all-reduce": lambda: data_parallel(arguments.events, 64),
        "64 ranks, 8 groups on one network": lambda: data_parallel(arguments.events, 64, groups=8),
    }
    rows = [_measure(case, make, arguments.repeat) for case, make in cases.items()]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        print(
            f"{row.case:32}{row.events:>10,} events {row.seconds:7.2f} s (median {row.median_seconds:.2f}) "
            f"{row.events_per_second:>12,.0f} events/s"
        )


if __name__ == "__main__":
    main()
