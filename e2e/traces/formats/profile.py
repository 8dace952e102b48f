"""What a profiler recorded, as records: host spans, device work, synchronisations. Times in seconds.

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
    """A collective as NCCL's metadata tell it. ``ranks`` is empty where unknown; sizes in elements of ``dtype``.

    ``peer``: of a send or receive, the other rank of the job (``None``: not told).
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    input_elements: int
    dtype: str
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class HostSpan:
    """An operator, a user annotation or a CUDA runtime call on a host thread (``thread`` is the system's id).

    ``external`` and ``function``: ids that link it to device work and to an execution trace; ``correlation``: of a
    runtime call, to device work; ``sequence`` and ``forward_thread`` link a backward operator with its forward one.
    ``shapes`` and ``dtypes`` of the inputs, where recorded.
    """

    id: int
    name: str
    kind: HostKind
    thread: int
    start: float
    end: float
    external: int | None = None
    function: int | None = None
    correlation: int | None = None
    sequence: int | None = None
    forward_thread: int = 0
    shapes: tuple[object, ...] = ()
    dtypes: tuple[str, ...] = ()
    collective: CollectiveInfo | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A kernel, copy or memset on ``stream`` of ``device``; ``size_bytes`` of copies and memsets."""

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
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Synchronization:
    """What a synchronising runtime call (by ``correlation``) waited for, as newer profilers tell.

    ``kind``: ``stream``, ``event``, ``stream_wait``, ``device``. ``stream`` is the waiting one of a ``stream_wait``
    and the awaited one of a ``stream``; ``record``: correlation of the ``cudaEventRecord`` that is awaited and
    ``record_stream`` where that was recorded.
    """

    kind: Literal["stream", "event", "stream_wait", "device"]
    correlation: int
    stream: int | None = None
    record: int | None = None
    record_stream: int | None = None


@dataclass(frozen=True)
class KinetoTrace:
    """One rank's profile. Host and device spans in the order of their starts; a span's ``id`` is unique in the trace.

    ``main_thread``: system id of the thread that runs the training loop.
    """

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
    main_thread: int = 0
    base_seconds: float = 0.0
    source: str = ""

    @property
    def end(self) -> float:
        """End of the last span, on host or device."""
        host = (span.end for spans in (self.operators, self.annotations, self.runtime) for span in spans)
        return max(max(host, default=0.0), max((span.end for span in self.device), default=0.0))
