"""Export of a timeline as a trace file for ui.perfetto.dev and chrome://tracing.

One process per rank, one track per thread and stream, arrows from launches to tasks, wait and transfer of a collective
as separate slices. Outer operators and named ranges (``record_function``) enclose others, on streams in tracks of their
own; the critical path is a process.

One iteration is written, of those simulated until the step had settled.

Times are whole nanoseconds: begin and end are rounded, not the length, so that neighbours never overlap.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from costmodel.base.errors import OutputError
from costmodel.base.output_files import whole_file
from costmodel.operators.any_operator import AnyOperator
from e2e.explain.critical_path import CriticalPath
from e2e.simulate.instructions import action_label
from e2e.simulate.timeline import RankLayout, Timeline
from e2e.step.execution_graph import (
    Action,
    Await,
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
from e2e.step.operator_trace import MARKED_GAPS, around, around_forward

# Track number of stream 0, and of the named ranges on it; threads count from 1.
FIRST_STREAM_TRACK = 1000
FIRST_RANGES_TRACK = 1_000_000
# Most characters shown of an operator's sizes.
_MOST_TEXT = 400

Event = dict[str, Any]


def write_trace(
    graph: ExecutionGraph, timeline: Timeline, path: Path, critical: CriticalPath | None = None, iteration: int = 0
) -> None:
    """Write Chrome trace JSON of one simulated iteration, compressed if ``path`` ends in ``.gz``.

    ``critical``: the path of the explained step, which gets a track. Raises :class:`OutputError` if the file cannot be
    written.
    """
    write_events(path, trace_events(graph, timeline, critical, iteration))


def write_events(path: Path, events: Iterable[Event]) -> None:
    """Write Chrome trace JSON of ``events``, compressed if ``path`` ends in ``.gz``; ``OutputError`` on failure."""
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    try:
        with whole_file(path) as file, ExitStack() as stack:
            if path.suffix == ".gz":
                # No time stamp: the same timeline gives the same file.
                packed = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=5, mtime=0)
                sink: Any = stack.enter_context(packed)
            else:
                sink = file
            sink.write(b'{"displayTimeUnit":"ns","traceEvents":[\n')
            separator = ""
            for event in events:
                sink.write(f"{separator}{encode(event)}".encode())
                separator = ",\n"
            sink.write(b"\n]}\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def trace_events(
    graph: ExecutionGraph, timeline: Timeline, critical: CriticalPath | None = None, iteration: int = 0
) -> Iterator[Event]:
    """Yield the events of the trace: metadata, slices (``X``), instants (``i``) and arrows (``s``, ``f``)."""
    if critical is not None:
        yield from _critical_events(critical, max(rank.rank for rank in graph.ranks) + 2)
    for layout, rank in zip(timeline.layouts, graph.ranks, strict=True):
        writer = _RankWriter(timeline, layout, rank, iteration)
        yield from writer.tracks()
        yield from writer.around()
        yield from writer.ranges_on_streams()
        yield from writer.actions()
        yield from writer.tasks()


def _critical_events(critical: CriticalPath, pid: int) -> Iterator[Event]:
    """Yield a process with one track for the critical path, above the ranks."""
    yield name_event("process_name", pid, 1, "critical path")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 1, "args": {"sort_index": -1}}
    yield name_event("thread_name", pid, 1, "critical path of the step")
    for segment in critical.segments:
        told = {"rank": segment.rank, "operator": segment.operator, "had to wait for": segment.waits_for,
                "by": segment.edge.name.lower().replace("_", " ")}  # fmt: skip
        end = segment.start + segment.seconds
        yield slice_event(segment.name, segment.kind, pid, 1, segment.start, end, told)


def name_event(what: str, pid: int, track: int, name: str) -> Event:
    """Return the event that names a process (``process_name``) or a track (``thread_name``)."""
    return {"ph": "M", "name": what, "pid": pid, "tid": track, "args": {"name": name}}


def slice_event(name: str, category: str, pid: int, track: int, start: float, end: float, arguments: Event) -> Event:
    """Return the slice of ``start`` to ``end`` seconds on a track."""
    begin, stop = round(start * 1e9), round(end * 1e9)
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": track, "ts": begin / 1e3,
            "dur": (stop - begin) / 1e3, "args": arguments}  # fmt: skip


def operator_text(operator: AnyOperator) -> str:
    """Format an operator record with its non-default fields: ``Gemm(m=64, n=16, k=32)``."""
    shown = []
    for each in fields(operator):
        value = getattr(operator, each.name)
        if each.default is MISSING or value != each.default:
            shown.append(f"{each.name}={value}")
    return f"{type(operator).__name__}({', '.join(shown)})"


class _RankWriter:
    def __init__(self, timeline: Timeline, layout: RankLayout, rank: RankGraph, iteration: int) -> None:
        self._layout, self._rank = layout, rank
        first = layout.offset + iteration * layout.nodes
        # Times in nanoseconds, by action and behind these by task.
        self._start, self._ready, self._end = (
            (of[first : first + layout.nodes] * 1e9).round().astype("int64").tolist()
            for of in (timeline.start, timeline.ready, timeline.end)
        )
        # Not the rank itself: some viewers treat process 0 as idle.
        self._pid = rank.rank + 1
        self._threads = {name: track for track, name in enumerate(rank.threads, start=1)}
        self._launches = {
            action.task: layout.threads[name][0] + place
            for name, actions in rank.threads.items()
            for place, action in enumerate(actions)
            if isinstance(action, Launch)
        }

    def tracks(self) -> Iterator[Event]:
        """Yield names and order of the tracks."""
        yield self._named("process_name", 1, {"name": f"rank {self._rank.rank}"})
        yield self._named("process_sort_index", 1, {"sort_index": self._rank.rank})
        streams = {
            FIRST_STREAM_TRACK + stream: f"stream {stream}" for stream in sorted(set(self._layout.streams.tolist()))
        }
        for track, name in ({track: name for name, track in self._threads.items()} | streams).items():
            yield self._named("thread_name", track, {"name": name})
            yield self._named("thread_sort_index", track, {"sort_index": track})

    def around(self) -> Iterator[Event]:
        """Yield outer operators and named ranges as slices that enclose others.

        Of slices with the same begin the outer comes first, as viewers require; actions follow all of these.
        """
        ranges = ranges_of_threads(self._rank)
        for name, actions in self._rank.threads.items():
            track, first = self._threads[name], self._layout.threads[name][0]
            known: dict[int | None, Chain] = {}
            chains: list[Chain] = []
            for outer, action in zip(ranges[name], actions, strict=True):
                call = call_of(action, self._rank)
                if call not in known:
                    known[call] = calls_around(self._rank, call)
                chains.append((*outer, *known[call]))
            yield from self._enclosing(chains, range(first, first + len(actions)), track)

    def ranges_on_streams(self) -> Iterator[Event]:
        """Yield a track of named ranges for every stream on which they have tasks."""
        streams: dict[int, list[Task]] = {}
        for task in self._rank.tasks:
            streams.setdefault(task.stream, []).append(task)
        for stream, tasks in sorted(streams.items()):
            # In order of execution.
            nodes = sorted((self._start[node], self._end[node], node) for node in map(self._node, tasks))
            chains = [
                ranges_around(self._rank, self._rank.tasks[node - self._layout.actions].call) for *_, node in nodes
            ]
            if not any(chains):
                continue
            track = FIRST_RANGES_TRACK + stream
            yield self._named("thread_name", track, {"name": f"ranges on stream {stream}"})
            # Directly above the stream itself.
            yield self._named("thread_sort_index", track, {"sort_index": FIRST_STREAM_TRACK + stream})
            yield from self._enclosing(chains, [node for *_, node in nodes], track)

    def _node(self, task: Task) -> int:
        return self._layout.actions + task.id

    def _enclosing(self, chains: Sequence[Chain], nodes: Sequence[int], track: int) -> Iterator[Event]:
        """Yield slices around neighbouring ``nodes``; ``chains``: enclosing spans of each node."""
        times = [(self._start[node], self._end[node]) for node in nodes]
        for outer, begin, end in shared_spans(chains, times):
            info = None if outer.call is None else self._rank.calls[outer.call]
            told = {} if info is None else {"phase": info.phase, "module": info.module}
            category = "around" if outer.entry is None else "range"
            yield self._slice(outer.name, category, track, int(begin), int(end), told)

    def actions(self) -> Iterator[Event]:
        for name, actions in self._rank.threads.items():
            for node, action in enumerate(actions, start=self._layout.threads[name][0]):
                yield from self._action(node, action, self._threads[name])

    def _action(self, node: int, action: Action, track: int) -> Iterator[Event]:
        start, end = self._start[node], self._end[node]
        name, category = self._describe(action)
        if isinstance(action, (RecordEvent, StreamWait, Signal)):
            yield {"ph": "i", "s": "t", **self._common(name, category, track, start)}
            return
        arguments = {"waited_us": (self._ready[node] - start) / 1e3}
        yield self._slice(name, category, track, start, end, arguments)
        if isinstance(action, Launch) and self._has_arrow(self._rank.tasks[action.task]):
            # An arrow leaves the slice that contains its time, so it starts at the begin of the launch.
            yield {"ph": "s", "id": self._arrow(action.task), **self._common("launch", "launch", track, start)}

    def _arrow(self, task: int) -> int:
        """Number of an arrow, unique across processes."""
        return self._layout.offset + task

    def tasks(self) -> Iterator[Event]:
        for task in self._rank.tasks:
            yield from self._task(task)

    def _task(self, task: Task) -> Iterator[Event]:
        node, track = self._node(task), FIRST_STREAM_TRACK + task.stream
        start, ready, end = self._start[node], self._ready[node], self._end[node]
        arguments = self._task_arguments(task)
        if ready > start:
            yield self._slice(f"{task.name} (wait)", "collective wait", track, start, ready, arguments)
        yield self._slice(task.name, task.kind, track, ready, end, arguments)
        if self._has_arrow(task):
            arrow = self._common("launch", "launch", track, start)
            yield {"ph": "f", "bp": "e", "id": self._arrow(task.id), **arrow}

    def _has_arrow(self, task: Task) -> bool:
        """True if launch and task have a length: viewers cannot bind an arrow to slices of length 0."""
        return all(self._end[node] > self._start[node] for node in (self._launches[task.id], self._node(task)))

    def _task_arguments(self, task: Task) -> Event:
        arguments: Event = {"task": task.id}
        if task.duration is not None:
            arguments |= {"bound": task.duration.bound, "source": task.duration.source}
        if task.operators:
            arguments["computes"] = "; ".join(map(operator_text, task.operators))[:_MOST_TEXT]
        if task.call is not None and task.call in self._rank.calls:
            call = self._rank.calls[task.call]
            arguments |= {"operator": call.name, "phase": call.phase, "module": call.module}
        if task.collective is not None:
            collective = task.collective
            arguments |= {"group": collective.group, "sequence": collective.sequence, "bytes": collective.size_bytes}
        return arguments

    def _describe(self, action: Action) -> tuple[str, str]:
        if isinstance(action, HostWork):
            call = self._rank.calls.get(action.call) if action.call is not None else None
            return (action.kind if call is None else call.name), action.kind
        return action_label(action, self._rank), "T4" if isinstance(action, Launch) else "synchronisation"

    def _slice(self, name: str, category: str, track: int, start: int, end: int, arguments: Event) -> Event:
        return {"ph": "X", "dur": (end - start) / 1e3, "args": arguments, **self._common(name, category, track, start)}

    def _common(self, name: str, category: str, track: int, start: int) -> Event:
        """Return the common fields of an event; ``ts`` in microseconds, as the format requires."""
        return {"name": name, "cat": category, "pid": self._pid, "tid": track, "ts": start / 1e3}

    def _named(self, what: str, track: int, arguments: Event) -> Event:
        return {"ph": "M", "name": what, "pid": self._pid, "tid": track, "args": arguments}


# --- spans that enclose neighbours on a thread or a stream: outer calls, and ranges named by the script


@dataclass(frozen=True, slots=True)
class Around:
    """Entry of a named range, or an outer call, that encloses something."""

    name: str
    # Entry of the named range.
    entry: int | None = None
    # Number of the outer call.
    call: int | None = None
    # It encloses the forward operator of a backward call.
    of_forward: bool = False


Chain = tuple[Around, ...]


def shared_spans(chains: Sequence[Chain], times: Sequence[tuple[float, float]]) -> list[tuple[Around, float, float]]:
    """Return spans shared by neighbours with begin and end, the outer one first if two begin together.

    ``chains``: enclosing spans of each neighbour, the outermost first; ``times``: its begin and end.
    """
    found: list[tuple[float, float, int, Around]] = []
    opened: list[tuple[Around, float]] = []
    end = 0.0
    for place, chain in enumerate((*chains, ())):
        same = len(_shared(chain, [each for each, _ in opened]))
        while len(opened) > same:
            each, begin = opened.pop()
            found.append((begin, -end, len(opened), each))
        if place < len(chains):
            opened += [(each, times[place][0]) for each in chain[same:]]
            end = times[place][1]
    return [(each, begin, -end) for begin, end, _, each in sorted(found, key=lambda span: span[:3])]


def ranges_around(rank: RankGraph, call: int | None) -> Chain:
    """Return the named ranges around ``call``, then those only around its forward call."""
    own = around(rank.ranges, rank.calls, call)
    before = [each for each in around_forward(rank.ranges, rank.calls, call) if each not in own]
    return (
        *(Around(each.name, each.id) for each in own),
        *(Around(f"{each.name} (backward)", each.id, of_forward=True) for each in before),
    )


def ranges_of_threads(rank: RankGraph) -> dict[str, list[Chain]]:
    """Map threads to the named ranges around each of their actions.

    Actions without a call (events, gaps outside operators) belong where their neighbours are. The main thread waiting
    for autograd belongs where ``backward()`` was called.
    """
    if not rank.ranges:
        return {name: [()] * len(actions) for name, actions in rank.threads.items()}
    signalled = dict(_signalled(rank))
    found: dict[str, list[Chain]] = {}
    for name, actions in rank.threads.items():
        told: list[Chain | None] = []
        for action in actions:
            call = call_of(action, rank)
            if isinstance(action, Await):
                told.append(signalled.get(action.flag))
            elif call is None or call not in rank.calls or rank.calls[call].name in MARKED_GAPS:
                told.append(None)
            else:
                told.append(ranges_around(rank, call))
        found[name] = _filled(told)
    return found


def call_of(action: Action, rank: RankGraph) -> int | None:
    """Return the number of the operator call of ``action``, or ``None``."""
    if isinstance(action, Launch):
        return rank.tasks[action.task].call
    return action.call if isinstance(action, HostWork | Synchronize) else None


def calls_around(rank: RankGraph, call: int | None) -> Chain:
    """Return the calls around ``call``, the outermost first."""
    found: list[Around] = []
    info = None if call is None else rank.calls.get(call)
    while info is not None and info.parent is not None and info.parent in rank.calls:
        info = rank.calls[info.parent]
        found.append(Around(info.name, call=info.id))
    return tuple(reversed(found))


def _signalled(rank: RankGraph) -> Iterator[tuple[int, Chain]]:
    """Yield each flag with the ranges in which another thread worked before signalling it.

    Ranges of forward calls are left out.
    """
    for actions in rank.threads.values():
        last: Chain = ()
        for action in actions:
            call = call_of(action, rank)
            if call is not None:
                last = tuple(each for each in ranges_around(rank, call) if not each.of_forward)
            if isinstance(action, Signal):
                yield action.flag, last


def _filled(told: Sequence[Chain | None]) -> list[Chain]:
    """Fill ``None`` entries of ``told`` with what the chains before and after them have in common."""
    following: list[Chain] = []
    after: Chain = ()
    for chain in reversed(told):
        after = after if chain is None else chain
        following.append(after)
    found: list[Chain] = []
    before: Chain = ()
    for chain, after in zip(told, reversed(following), strict=True):
        before = _shared(before, after) if chain is None else chain
        found.append(before)
    return found


def _shared(one: Chain, other: Sequence[Around]) -> Chain:
    """Return the outermost spans that both have in common."""
    pairs = zip(one, other, strict=False)
    return tuple(each for each, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
