"""Order between streams: events of the script, streams of communicators, waits for results; ranks and input sizes of
collectives and point-to-point calls.

NCCL runs an asynchronous collective on the stream of its communicator, after the work already on the current stream;
``wait()`` makes the current stream, not the host, wait for it. With ``async_op=False`` it runs on the current stream
itself (PyTorch 2.8 and later). Results without an explicit wait (DDP waits in C++, which recorded traces do not show)
are awaited by the first kernel that uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from e2e.lowering.families.work import on_gpu, size_bytes
from e2e.step.collective_names import EAGER, FUNCTIONAL, OUTPUT_FIRST, SCATTER
from e2e.step.execution_graph import Collective, RankWriter
from e2e.step.operator_trace import OperatorCall, Tensor, Value, tensors

# First stream of collectives, which run concurrently with computation; larger than any stream id of a trace.
FIRST_STREAM = 1_000_000


def written(call: OperatorCall, kind: str) -> set[int]:
    """Return the storages that are complete only when the collective has ended."""
    if kind in ("send", "barrier"):
        return set()
    given = call.inputs[:1] if call.name.startswith(EAGER) and call.inputs else (*call.inputs, *call.outputs)
    return {tensor.storage for tensor in tensors(given) if on_gpu(tensor)}


@dataclass
class Communicators:
    """Process groups of a rank: ranks of a call, and the stream on which NCCL runs it.

    ``groups``: name -> ranks. Point-to-point calls between two ranks are numbered separately by direction, as NCCL
    matches them.
    """

    groups: Mapping[str, tuple[int, ...]]
    world_size: int
    writer: RankWriter
    _streams: dict[object, int] = field(default_factory=dict)

    def collective(self, call: OperatorCall, kind: str) -> Collective:
        """Return the collective of ``call``; all ranks take part if the trace does not give the group."""
        name, ranks = self.group(call)
        peer, rank = call.attributes.get("peer"), self.writer.rank
        if isinstance(peer, int):
            source, target = (rank, peer) if kind == "send" else (peer, rank)
            name, ranks = f"{name}: {source} to {target}", (source, target)
        sent = put_in(call)
        taken = sum(_sizes(call.inputs[:1] if call.name.startswith(EAGER) else call.outputs))
        uneven = kind == "all_to_all" and taken not in (0, sent)
        return Collective(kind, name, ranks, self.writer.next_in(name), sent, taken if uneven else None)

    def group(self, call: OperatorCall) -> tuple[str, tuple[int, ...]]:
        """Return name and ranks of the process group of ``call``."""
        name = str(call.attributes.get("process_group") or call.attributes.get("pg_name") or "")
        return name, self.groups.get(name) or tuple(range(self.world_size))

    def stream(self, call: OperatorCall) -> int:
        """Return the stream of the call's NCCL communicator: of the group, or of two ranks for a call outside a
        batch.
        """
        name = self.group(call)[0]
        alone = "peer" in call.attributes and "batch" not in call.attributes
        return self._number((name, call.attributes["peer"]) if alone else name)

    def lane(self, call: OperatorCall, place: int) -> int:
        """Return the separate stream of a part of a batch, since the parts run concurrently."""
        return self._number((self.group(call)[0], "batch", place))

    def _number(self, key: object) -> int:
        return self._streams.setdefault(key, FIRST_STREAM + len(self._streams))


def put_in(call: OperatorCall) -> int:
    """Return the input bytes of this rank: its shard of a gather, all data that it scatters or exchanges, or the
    received bytes.
    """
    place = 1 if call.name in OUTPUT_FIRST else 0
    given: tuple[Value, ...] = call.inputs[place : place + 1] if call.name.startswith((EAGER, FUNCTIONAL)) else ()
    found = [size_bytes(tensor) for tensor in tensors(given) if on_gpu(tensor)]
    if call.name == SCATTER and not found:
        group = call.attributes.get("group_size", 1)
        return sum(_sizes(call.inputs)) * (group if isinstance(group, int) else 1)
    return sum(found) if found else sum(_sizes(call.inputs) or _sizes(call.outputs))


def _sizes(values: tuple[Value, ...]) -> list[int]:
    return [size_bytes(tensor) for tensor in tensors(values) if isinstance(tensor, Tensor) and on_gpu(tensor)]


RECORD, WAIT = "cudaEventRecord", "cudaStreamWaitEvent"
SYNCHRONIZING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")

LaunchOn = Callable[[int, Collective], None]


@dataclass
class StreamOrder:
    """Events and unfinished communication of one rank during its lowering."""

    writer: RankWriter
    communicators: Communicators
    events: dict[int, int] = field(default_factory=dict)
    works: dict[int, int] = field(default_factory=dict)
    pending: dict[int, int] = field(default_factory=dict)
    # Communicator -> end of its last collective, and its stream.
    _last: dict[int, tuple[int, int]] = field(default_factory=dict)
    _batch: object = None
    _lanes: int = 0
    _begun: int = 0

    def runtime_call(self, call: OperatorCall) -> None:
        """Handle a recorded event or a stream's wait. Events of an earlier step have been reached already and are
        ignored.
        """
        stream = _number(call, "stream") or 0
        event, work = _number(call, "event"), _number(call, "work")
        if call.name == RECORD and event is not None:
            self.events[event] = self.writer.record_event(stream)
        elif event is not None and event in self.events:
            self.writer.wait_event(self.events[event], stream)
        elif work is not None and work in self.works:
            self._wait(self.works[work], stream)

    def synchronize(self, call: OperatorCall) -> None:
        """Make the host wait for an event, a stream or the whole device."""
        event = _number(call, "event")
        if event is None:
            self.writer.synchronize(call.id, stream=_number(call, "stream"))
        elif event in self.events:
            self.writer.synchronize(call.id, event=self.events[event])

    def communicate(self, call: OperatorCall, kind: str, stream: int, launch: LaunchOn) -> None:
        """Launch the call on its stream by ``launch`` and note the storages that are complete at its end."""
        collective = self.communicators.collective(call, kind)
        own = target = self.communicators.stream(call)
        if call.attributes.get("async_op") is False:
            self.await_storages(written(call, kind), stream)
            self._after_the_last(own, stream)
            launch(stream, collective)
            self._last[own] = (self.writer.record_event(stream), stream)
            if call.attributes.get("blocks_host"):
                self.writer.synchronize(call.id, stream=stream)
            return
        if "batch" in call.attributes:
            target = self._lane(call, own)
            self.writer.wait_event(self._begun, target)
        self.writer.after(target, stream)
        if target == own:
            self._after_the_last(own, target)
        launch(target, collective)
        done = self.writer.record_event(target)
        self._last[own] = (done, own)
        if target != own:
            self.writer.wait_event(done, own)
        work = _number(call, "work")
        if work is not None:
            self.works[work] = done
        for storage in written(call, kind):
            self.pending[storage] = done

    def _after_the_last(self, communicator: int, stream: int) -> None:
        event, before = self._last.get(communicator, (0, stream))
        if before != stream:
            self.writer.wait_event(event, stream)

    def await_storages(self, storages: Iterable[int], stream: int) -> None:
        """Make ``stream`` wait for the communication that fills ``storages``."""
        for storage in storages:
            event = self.pending.get(storage)
            if event is not None:
                self._wait(event, stream)

    def _wait(self, event: int, stream: int) -> None:
        self.writer.wait_event(event, stream)
        for storage in [storage for storage, waited in self.pending.items() if waited == event]:
            del self.pending[storage]

    def _lane(self, call: OperatorCall, own: int) -> int:
        """Return the stream of a part of a batch; all parts begin after earlier work on the communicator's stream
        ``own``.
        """
        if call.attributes["batch"] != self._batch:
            self._after_the_last(own, own)
            self._batch, self._lanes, self._begun = call.attributes["batch"], 0, self.writer.record_event(own)
        self._lanes += 1
        return self.communicators.lane(call, self._lanes)


def _number(call: OperatorCall, name: str) -> int | None:
    value = call.attributes.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
