"""Timeline data of a report: the explained step as tracks of slices, compact enough for 100,000 of them.

Times are whole nanoseconds from the start of the step. Consecutive host actions of one operator call are one slice.
Everything within the window of the step is shown, whichever iteration it belongs to: the host is ahead of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from e2e.explain.breakdowns import phase_spans
from e2e.explain.critical_path import HOST_KINDS, Segment, task_kind, wait_kind
from e2e.explain.predictor import PredictionResult
from e2e.report.enclosing import Enclosed, call_of, enclosed, ranges_around
from e2e.simulate.instructions import describe
from e2e.simulate.timeline import RankLayout
from e2e.step.execution_graph import Await, Launch, RankGraph, Synchronize, Task

# Kind of a slice -> its label and colour.
KINDS: dict[str, tuple[str, str]] = {
    "forward": ("forward", "#6a9fd4"),
    "backward": ("backward", "#b5649a"),
    "optimizer": ("optimizer", "#b08c2a"),
    "other": ("other", "#777777"),
    "compute": ("kernel limited by arithmetic", "#228833"),
    "memory": ("kernel limited by memory", "#2a9d8f"),
    "kernel": ("kernel", "#4c9f50"),
    "copy": ("copy", "#7a8b99"),
    "collective transfer": ("collective transfer", "#4477aa"),
    "collective wait": ("waiting in a collective", "#cc7a29"),
    "bubble": ("waiting in a pipeline", "#b8a11f"),
    "host": ("host", "#8d6aa8"),
    "synchronisation": ("host waits", "#c2556b"),
    "range": ("named range", "#6f8f3f"),
    "idle": ("idle", "#9aa3ad"),
    "late start": ("late start", "#9aa3ad"),
}
PHASES = ("forward", "backward", "optimizer", "other")
# Limits of the shown slices and ranks.
MOST_SLICES = 120_000
MOST_RANKS = 8
# Deepest shown nesting of named ranges.
MOST_DEPTHS = 4


@dataclass(frozen=True)
class TimelineData:
    """Data of the timeline."""

    # Input of `timeline.js`.
    document: dict[str, Any]
    # The shown ranks.
    ranks: tuple[int, ...]
    # Number of slices of all tracks.
    slices: int


def timeline_data(result: PredictionResult) -> TimelineData:
    """Return the tracks of the critical path, then those of the rank that computes longest and of ranks on the path."""
    writer = _Writer(result)
    writer.path()
    shown: list[int] = []
    for rank in _ranks(result)[:MOST_RANKS]:
        if shown and writer.slices + writer.size(rank) > MOST_SLICES:
            continue
        writer.rank(rank)
        shown.append(rank)
    return TimelineData(writer.document(), tuple(shown), writer.slices)


def _ranks(result: PredictionResult) -> list[int]:
    """Return the ranks in order of interest."""
    longest = result.prediction.longest_computing.rank
    return list(dict.fromkeys([longest, *result.path.by_rank, *(rank.rank for rank in result.graph.ranks)]))


@dataclass
class _Track:
    """Track of slices in order of time; ``begins`` and ``ends`` in nanoseconds."""

    name: str
    group: str
    thin: bool = False
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    notes: list[int] = field(default_factory=list)
    critical: list[int] = field(default_factory=list)
    launch_track: list[int] = field(default_factory=list)
    launch_slice: list[int] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return the input of ``timeline.js``: begins as differences; empty columns are left out."""
        found: dict[str, Any] = {
            "name": self.name,
            "group": self.group,
            "starts": np.diff(np.array([0, *self.begins])).tolist(),
            "lengths": [end - begin for begin, end in zip(self.begins, self.ends, strict=True)],
            "names": self.names,
            "kinds": self.kinds,
        }
        if self.thin:
            found["thin"] = True
        if any(note >= 0 for note in self.notes):
            found["notes"] = self.notes
        if any(self.critical):
            found["critical"] = self.critical
        if any(track >= 0 for track in self.launch_track):
            found |= {"launchTrack": self.launch_track, "launchSlice": self.launch_slice}
        return found


class _Writer:
    def __init__(self, result: PredictionResult) -> None:
        self._result, self._timeline = result, result.timeline
        self._low, self._high = result.timeline.window(result.iteration)
        self._tracks: list[_Track] = []
        self._names: dict[str, int] = {}
        self._texts: list[str] = []
        self._kinds = list(KINDS)
        self._ranks = {rank.rank: (rank, layout) for rank, layout in
                       zip(result.graph.ranks, result.timeline.layouts, strict=True)}  # fmt: skip
        self.slices = 0

    def document(self) -> dict[str, Any]:
        """Return the whole document."""
        return {
            "length": max(self._nanoseconds(self._high), 1),
            "names": self._texts,
            "kinds": [list(KINDS[kind]) for kind in self._kinds],
            "tracks": [track.document() for track in self._tracks],
        }

    def path(self) -> None:
        """Add the track of the critical path through all ranks."""
        several = len(self._ranks) > 1
        track = self._track("critical path", "step")
        for segment in self._result.path.segments:
            where = f"rank {segment.rank}: " if several else ""
            begin, end = segment.start, segment.start + segment.seconds
            name = segment.operator if segment.kind in HOST_KINDS else segment.name
            note = f"{segment.kind} of {segment.operator}, had to wait for {segment.waits_for}"
            self._add(track, begin, end, where + name, self._kind_of(segment), note)

    def size(self, number: int) -> int:
        """Approximate number of slices of a rank."""
        return int(self._visible(self._ranks[number][1]).sum())

    def rank(self, number: int) -> None:
        """Add the tracks of phases, host threads and streams of a rank."""
        rank, layout = self._ranks[number]
        group = f"rank {number}" if len(self._ranks) > 1 else "GPU and host"
        phases = self._track("phases", group, thin=True)
        for phase, begin, end in phase_spans(rank, self._timeline, self._result.iteration):
            self._add(phases, begin, end, phase, phase if phase in PHASES else "other")
        segments = [each for each in self._result.path.segments if each.rank == number]
        launches = self._host(rank, layout, group, [each for each in segments if each.kind in HOST_KINDS])
        self._device(rank, layout, group, segments, launches)

    def _visible(self, layout: RankLayout) -> Any:
        """Return which nodes are partly within the window, shape (iterations, nodes)."""
        part = slice(layout.offset, layout.offset + self._timeline.iterations * layout.nodes)
        start, end = self._timeline.start[part], self._timeline.end[part]
        within = (end > self._low) & (start < self._high) & (end > start)
        return within.reshape(self._timeline.iterations, layout.nodes)

    def _host(
        self, rank: RankGraph, layout: RankLayout, group: str, segments: Sequence[Segment]
    ) -> dict[tuple[int, int], tuple[int, int]]:
        """Add the tracks of the threads; return (iteration, task) -> track and slice of its launch."""
        visible = self._visible(layout)
        launches: dict[tuple[int, int], tuple[int, int]] = {}
        for name, actions in rank.threads.items():
            first = layout.threads[name][0]
            track = self._track(f"thread {name}", group)
            before: object = None
            for iteration in range(self._timeline.iterations):
                for place in np.flatnonzero(visible[iteration, first : first + len(actions)]).tolist():
                    action = actions[place]
                    node = layout.offset + iteration * layout.nodes + first + place
                    begin, end = float(self._timeline.start[node]), float(self._timeline.end[node])
                    call = call_of(action, rank)
                    same = call is not None and before == (iteration, call) and not isinstance(action, Synchronize)
                    if same and track.ends[-1] >= self._nanoseconds(begin) - 1:
                        track.ends[-1] = self._nanoseconds(min(end, self._high))
                    else:
                        waits = isinstance(action, Synchronize | Await)
                        known = call is not None and call in rank.calls and not waits
                        text = rank.calls[call].name if known and call is not None else describe(action, rank)
                        note = rank.calls[call].module if known and call is not None else ""
                        self._add(track, begin, end, text, "synchronisation" if waits else "host", note)
                    before = (iteration, call)
                    if isinstance(action, Launch):
                        launches[iteration, action.task] = len(self._tracks) - 1, len(track.begins) - 1
            self._mark(track, segments)
        return launches

    def _device(
        self,
        rank: RankGraph,
        layout: RankLayout,
        group: str,
        segments: Sequence[Segment],
        launches: dict[tuple[int, int], tuple[int, int]],
    ) -> None:
        """Add the tracks of the streams."""
        visible = self._visible(layout)[:, layout.actions :]
        streams: dict[int, list[tuple[float, float, float, int, int]]] = {}
        for iteration in range(self._timeline.iterations):
            for number in np.flatnonzero(visible[iteration]).tolist():
                node = layout.offset + iteration * layout.nodes + layout.actions + number
                times = (float(of[node]) for of in (self._timeline.start, self._timeline.ready, self._timeline.end))
                start, ready, end = times
                streams.setdefault(rank.tasks[number].stream, []).append((start, ready, end, iteration, number))
        on_path = {each.task for each in segments if each.task is not None}
        for stream, entries in sorted(streams.items()):
            self._ranges(rank, group, stream, entries)
            track = self._track(f"stream {stream}", group)
            for start, ready, end, iteration, number in sorted(entries):
                task = rank.tasks[number]
                critical = iteration == self._result.iteration and number in on_path
                launch = launches.get((iteration, number), (-1, -1))
                note = _note(task, rank)
                if ready > max(start, self._low):
                    self._add(track, start, ready, f"{task.name} (wait)", wait_kind(task), note, critical, launch)
                if end > ready:
                    self._add(track, ready, end, task.name, self._known(task_kind(task)), note, critical, launch)

    def _ranges(
        self, rank: RankGraph, group: str, stream: int, entries: Sequence[tuple[float, float, float, int, int]]
    ) -> None:
        """Add the tracks of the named ranges on ``stream``, one for each depth."""
        if not rank.ranges:
            return
        spans: list[Enclosed] = []
        for iteration in range(self._timeline.iterations):
            inside = sorted(each for each in entries if each[3] == iteration)
            chains = [ranges_around(rank, rank.tasks[number].call) for *_, number in inside]
            spans += enclosed(chains, [(start, end) for start, _, end, _, _ in inside])
        for depth in range(min(max((each.depth for each in spans), default=-1) + 1, MOST_DEPTHS)):
            deep = f", {depth + 1} deep" if depth else ""
            track = self._track(f"ranges on stream {stream}{deep}", group, thin=True)
            for each in spans:
                if each.depth == depth:
                    self._add(track, each.begin, each.end, each.around.name, "range")

    def _mark(self, track: _Track, segments: Sequence[Segment]) -> None:
        """Mark host slices during which the critical path is on the host, for the same call."""
        place = 0
        for segment in segments:
            begin, end = self._nanoseconds(segment.start), self._nanoseconds(segment.start + segment.seconds)
            while place < len(track.ends) and track.ends[place] <= begin:
                place += 1
            inside = place < len(track.ends) and track.begins[place] < end
            if inside and segment.operator in self._texts[track.names[place]]:
                track.critical[place] = 1

    def _track(self, name: str, group: str, thin: bool = False) -> _Track:
        self._tracks.append(_Track(name, group, thin))
        return self._tracks[-1]

    def _add(
        self, track: _Track, begin: float, end: float, name: str, kind: str, note: str = "", critical: bool = False,
        launch: tuple[int, int] = (-1, -1),
    ) -> None:  # fmt: skip
        begin, end = max(begin, self._low), min(end, self._high)
        if end <= begin:
            return
        self.slices += 1
        track.begins.append(self._nanoseconds(begin))
        track.ends.append(max(self._nanoseconds(end), track.begins[-1]))
        track.names.append(self._name(name))
        track.kinds.append(self._kinds.index(kind))
        track.notes.append(self._name(note) if note else -1)
        track.critical.append(int(critical))
        track.launch_track.append(launch[0])
        track.launch_slice.append(launch[1])

    def _name(self, text: str) -> int:
        if text not in self._names:
            self._names[text] = len(self._texts)
            self._texts.append(text)
        return self._names[text]

    def _nanoseconds(self, seconds: float) -> int:
        return round((seconds - self._low) * 1e9)

    def _kind_of(self, segment: Segment) -> str:
        if segment.kind == "synchronisation":
            return "synchronisation"
        return "host" if segment.kind in HOST_KINDS else self._known(segment.kind)

    def _known(self, kind: str) -> str:
        return kind if kind in KINDS else "kernel"


def _note(task: Task, rank: RankGraph) -> str:
    """Tooltip of a task: operator, module, phase, size, limit and price source."""
    call = None if task.call is None else rank.calls.get(task.call)
    parts = []
    if call is not None:
        parts.append(f"for {call.name}" + (f" in {call.module}" if call.module else "") + f", {call.phase}")
    if task.collective is not None:
        parts.append(f"{task.collective.size_bytes:,} bytes, {len(task.collective.ranks)} ranks")
    if task.duration is not None and task.duration.bound:
        parts.append(f"limited by {task.duration.bound}; price {task.duration.source}")
    return "; ".join(parts)
