"""CUDA streams and events without CUDA: scripts create, enter and wait for them, and the calls are recorded.

Streams are numbered in the order of their creation; 0 is the default stream. A call that only affects order
(``cudaEventRecord``, ``cudaStreamWaitEvent`` ...) becomes a record named like the runtime call, with stream and event
numbers in its attributes; :mod:`e2e.lowering` turns it into an action of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

DEFAULT = 0
RECORD, WAIT = "cudaEventRecord", "cudaStreamWaitEvent"
SYNCHRONIZE_STREAM, SYNCHRONIZE_EVENT = "cudaStreamSynchronize", "cudaEventSynchronize"

Note = Callable[..., None]  # callback for a runtime call: name, then attributes


def nobody(name: str, **attributes: Any) -> None:
    """Ignore a runtime call."""


class StreamState:
    """Current stream, and callback for runtime calls."""

    def __init__(self) -> None:
        self.note: Note = nobody
        self._made = 0
        self._events = 0
        self._entered: list[int] = []
        # Stream of the running autograd node: that of its forward operator.
        self.node = DEFAULT

    @property
    def current(self) -> int:
        """Stream of new work."""
        return self._entered[-1] if self._entered else self.node

    def make(self) -> int:
        """Return the number of a new stream."""
        self._made += 1
        return self._made

    def make_event(self) -> int:
        """Return the number of a new event."""
        self._events += 1
        return self._events

    def follow(self, stream: int, other: int) -> None:
        """Make later work on ``stream`` wait for the work already on ``other``."""
        if stream != other:
            event = self.make_event()
            self.note(RECORD, event=event, stream=other)
            self.note(WAIT, event=event, stream=stream)

    def choose(self, stream: int) -> None:
        """Send later work to ``stream``."""
        self._entered[:] = [stream]

    @contextmanager
    def entered(self, stream: int | None) -> Iterator[None]:
        """Context in which work is sent to ``stream`` (None: no change)."""
        depth = len(self._entered)
        if stream is not None:
            self._entered.append(stream)
        try:
            yield
        finally:
            del self._entered[depth:]


def stream_classes(state: StreamState) -> tuple[type, type]:
    """Return replacements of ``torch.cuda.Stream`` and ``torch.cuda.Event`` that report to ``state``."""

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, number: int | None = None, **more: Any) -> None:
            self.stream_id = state.make() if number is None else number
            self.cuda_stream = self.stream_id
            self.device = torch.device("cuda", 0)
            self.device_index = 0
            self.priority = priority

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def wait_stream(self, stream: Any) -> None:
            state.follow(self.stream_id, stream.stream_id)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        def synchronize(self) -> None:
            state.note(SYNCHRONIZE_STREAM, stream=self.stream_id)

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:
            return False

        def __enter__(self) -> Any:
            self._inside = state.entered(self.stream_id)
            self._inside.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self._inside.__exit__(None, None, None)

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(("stream", self.stream_id))

    class Event:
        def __init__(self, *args: Any, **more: Any) -> None:
            self.event_id = state.make_event()
            self._recorded = False

        def record(self, stream: Any = None) -> Any:
            number = state.current if stream is None else stream.stream_id
            self._recorded = True
            state.note(RECORD, event=self.event_id, stream=number)
            return self

        def wait(self, stream: Any = None) -> None:
            if self._recorded:  # waiting for an event that was never recorded does nothing
                number = state.current if stream is None else stream.stream_id
                state.note(WAIT, event=self.event_id, stream=number)

        def synchronize(self) -> None:
            if self._recorded:
                state.note(SYNCHRONIZE_EVENT, event=self.event_id)

        def query(self) -> bool:
            return True

        def elapsed_time(self, end: Any) -> float:
            """Return a fixed number of milliseconds, since nothing has run."""
            return 1.0

    return Stream, Event


@contextmanager
def pretend_streams(state: StreamState) -> Iterator[None]:
    """Context in which ``torch.cuda`` and ``torch.accelerator`` have streams and events."""
    stream_class, event_class = stream_classes(state)

    def current(device: Any = None) -> Any:
        return stream_class(number=state.current)

    def default(device: Any = None) -> Any:
        return stream_class(number=DEFAULT)

    def inside(stream: Any) -> Any:
        return state.entered(None if stream is None else stream.stream_id)

    def choose(stream: Any) -> None:
        state.choose(stream.stream_id)

    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "Stream", stream_class),
            (torch.cuda, "Event", event_class),
            (torch.cuda, "current_stream", current),
            (torch.cuda, "default_stream", default),
            (torch.cuda, "stream", inside),
            (torch.cuda, "StreamContext", inside),
            (torch.cuda, "set_stream", choose),
            (torch, "Stream", stream_class),
            (torch, "Event", event_class),
            (torch.accelerator, "current_stream", current),
            (torch.accelerator, "set_stream", choose),
            (torch.accelerator, "synchronize", lambda device=None: torch.cuda.synchronize()),
        ):
            stack.enter_context(patch.object(target, name, value))
        # Affects only the allocator.
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda self, stream: None, create=True))
        yield
