"""Records of a profile: host spans, device work, synchronisations. Times in seconds.

Times count from :attr:`KinetoTrace.base_seconds`, the first event of the file, so that floats keep nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

HostKind = Literal["operator", "annotation", "runtime"]
DeviceKind = Literal["kernel", "copy", "memset"]


@dataclass(frozen=True, slots=True)
class CollectiveInfo:
    """Collective as described by NCCL's metadata."""

    kind: str
    group: str
    # Empty if unknown.
    ranks: tuple[int, ...]
    # Size in elements of `dtype`.
    input_elements: int
    dtype: str
    # Other rank of a send or receive, by its number in the job; `None`: unknown.
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class HostSpan:
    """Operator, user annotation or CUDA runtime call on a host thread."""

    id: int
    name: str
    kind: HostKind
    # The system's thread id.
    thread: int
    start: float
    end: float
    # Id that links it to device work.
    external: int | None = None
    # Id that links it to an execution trace.
    function: int | None = None
    # Correlation id of a runtime call, which links it to device work.
    correlation: int | None = None
    # `sequence` and `forward_thread` link a backward operator with its forward one
    sequence: int | None = None
    forward_thread: int = 0
    # Shapes and dtypes of the inputs, if recorded.
    shapes: tuple[object, ...] = ()
    dtypes: tuple[str, ...] = ()
    collective: CollectiveInfo | None = None

    @property
    def seconds(self) -> float:
        """Duration of the span."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """Kernel, copy or memset on ``stream`` of ``device``; ``size_bytes``: of copies and memsets."""

    id: int
    name: str
    kind: DeviceKind
    device: int
    stream: int
    start: float
    end: float
    correlation: int
    external: int | None = None
    size_bytes: int = 0
    collective: CollectiveInfo | None = None

    @property
    def seconds(self) -> float:
        """Duration of the span."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Synchronization:
    """Target of a synchronising runtime call, as recorded by newer profilers."""

    kind: Literal["stream", "event", "stream_wait", "device"]
    # Correlation id of the runtime call.
    correlation: int
    # Waiting stream of a `stream_wait`, awaited stream of a `stream`.
    stream: int | None = None
    # Correlation of the awaited `cudaEventRecord`, if recorded; `record_stream`: its stream.
    record: int | None = None
    record_stream: int | None = None


@dataclass(frozen=True)
class KinetoTrace:
    """Profile of one rank. Spans are in the order of their starts; a span's ``id`` is unique in the trace."""

    operators: tuple[HostSpan, ...]
    annotations: tuple[HostSpan, ...]
    runtime: tuple[HostSpan, ...]
    device: tuple[DeviceSpan, ...]
    synchronizations: tuple[Synchronization, ...] = ()
    rank: int = 0
    world_size: int = 1
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    gpu: str = ""
    pid: int = 0
    # System id of the thread that runs the training loop.
    main_thread: int = 0
    base_seconds: float = 0.0
    source: str = ""

    @property
    def end(self) -> float:
        """End of the last span, on host or device."""
        host = (span.end for spans in (self.operators, self.annotations, self.runtime) for span in spans)
        return max(max(host, default=0.0), max((span.end for span in self.device), default=0.0))
