"""Order between streams: events of the script, streams of communicators, waits for results.

NCCL runs an asynchronous collective on the stream of its communicator, after the work already on the current stream;
``wait()`` makes the current stream, not the host, wait for it. With ``async_op=False`` it runs on the current stream
itself (PyTorch 2.8 and later). Results without an explicit wait (DDP waits in C++, which recorded traces do not show)
are awaited by the first kernel that uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from e2e.lowering.collective_operators import Communicators, written
from e2e.step.execution_graph import Collective
from e2e.step.operator_trace import OperatorCall
from e2e.step.rank_writer import RankWriter

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
