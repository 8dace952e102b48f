"""Streaming reader of Kineto profiles (``torch.profiler`` Chrome traces) as :class:`KinetoTrace`: host spans, device
work, synchronisations. Times in seconds.

Times of the format are microseconds with fractions, whatever ``displayTimeUnit`` says; files whose times can only be
nanoseconds (converted ones) are recognised by their magnitude. Times of the records count from
:attr:`KinetoTrace.base_seconds`, the first event of the file, so that floats keep nanoseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from costmodel.base.errors import InputError
from costmodel.base.input_files import MALFORMED, decoded
from e2e.step.collective_names import kind_of_short
from e2e.traces.execution_trace import DTYPES
from e2e.traces.json_stream import read_members

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


# Microseconds since 1970 stay below this until the year 5138; nanoseconds passed it in 1973.
_NANOSECONDS_ABOVE = 10**17
_HOST: dict[str, HostKind] = {
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
}
_MARKS = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)#")
_DEVICE: dict[str, DeviceKind] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "gpu_memset": "memset",
    "memset": "memset",
}
_SYNC = {"Stream Sync": "stream", "Event Sync": "event", "Stream Wait Event": "stream_wait", "Context Sync": "device"}
# Unknown streams and correlations are written as -1 or as its unsigned form.
_UNKNOWN = (-1, 2**32 - 1, 2**64 - 1)


def read_kineto(path: Path | str) -> KinetoTrace:
    """Read the profile ``path`` (archives: :func:`e2e.traces.json_stream.read_members`).

    Raises :class:`InputError` naming the file if it is truncated, of another format, or has no events with a duration.
    """
    header: dict[str, Any] = {}
    collector = _Collector(str(path))
    for key, value in read_members(path):
        if key == "traceEvents":
            collector.add(value)
        elif key == "nodes":
            raise InputError(f"{path}: an execution trace, not a profiler (Kineto) trace; give it as --trace")
        elif key == "deviceProperties":
            header.setdefault(key, []).append(value)
        else:
            header[key] = value
    return collector.trace(header)


class _Collector:
    """Collector of events; times stay exact (``Decimal`` or ``int``) until the first one is known."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._host: list[tuple[Any, Any, HostKind, dict[str, Any]]] = []
        self._device: list[tuple[Any, Any, DeviceKind, dict[str, Any]]] = []
        self._synchronizations: list[Synchronization] = []
        self._first: Any = None

    def add(self, event: Any) -> None:
        try:
            self._add(event)
        except MALFORMED as error:
            name = event.get("name") if isinstance(event, dict) else event
            reason = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{self._source}: event {name!r} is not of a profiler trace ({reason}); record it again"
            ) from None

    def _add(self, event: dict[str, Any]) -> None:
        phase, category = event["ph"], str(event.get("cat", "")).lower()
        if phase == "X" and (category in _HOST or category in _DEVICE):
            start = event["ts"]
            if self._first is None or start < self._first:
                self._first = start
            if category in _HOST:
                # PyTorch up to 1.8 records the profiler's own marks as operators.
                own = str(event["name"]).startswith(_MARKS)
                self._host.append((start, event["dur"], "annotation" if own else _HOST[category], _kept(event)))
            else:
                self._device.append((start, event["dur"], _DEVICE[category], _kept(event)))
        elif phase == "X" and category == "cuda_sync":
            self._synchronizations.append(_synchronization(event["args"]))

    def trace(self, header: Mapping[str, Any]) -> KinetoTrace:
        """Return the collected trace, with times in seconds from the first event."""
        if self._first is None:
            raise InputError(
                f"{self._source}: not a profiler trace, or an empty one (no events with a duration); "
                "record it with torch.profiler"
            )
        try:
            scale = 1e-9 if self._first > _NANOSECONDS_ABOVE else 1e-6
            return self._trace(header, scale)
        except MALFORMED as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{self._source}: an event, or what is told of the run, is not what profilers write ({reason}); "
                "record it again"
            ) from None

    def _trace(self, header: Mapping[str, Any], scale: float) -> KinetoTrace:
        host = sorted((self._host_span(i, item, scale) for i, item in enumerate(self._host)), key=_host_order)
        device = [self._device_span(i, item, scale) for i, item in enumerate(self._device)]
        device.sort(key=lambda span: (span.start, span.end, span.id))
        by_kind = {kind: tuple(span for span in host if span.kind == kind) for kind in set(_HOST.values())}
        distributed = header.get("distributedInfo") or {}
        if not isinstance(distributed, dict):
            raise TypeError(f"distributedInfo is {str(distributed)[:40]!r}, not a mapping with rank and world_size")
        world = int(distributed.get("world_size", 1))
        pids = Counter(item[3]["pid"] for item in self._host if isinstance(item[3]["pid"], int))
        pid = pids.most_common(1)[0][0] if pids else 0
        operators = by_kind["operator"]
        return KinetoTrace(
            operators,
            by_kind["annotation"],
            by_kind["runtime"],
            tuple(device),
            tuple(self._synchronizations),
            int(distributed.get("rank", 0)),
            world,
            _process_groups(distributed, world),
            _gpu(header, device),
            pid,
            _main_thread(host, pid),
            float(self._first) * scale,
            self._source,
        )

    def _seconds(self, start: Any, duration: Any, scale: float) -> tuple[float, float]:
        begin, taken = float(Decimal(start) - Decimal(self._first)) * scale, float(duration) * scale
        if not (math.isfinite(begin) and math.isfinite(taken)):
            raise ValueError(f"an event begins at {start} and takes {duration}")
        return begin, begin + max(taken, 0.0)  # with clocks that were aligned afterwards, the end may precede the begin

    def _host_span(self, place: int, item: tuple[Any, Any, HostKind, dict[str, Any]], scale: float) -> HostSpan:
        args = item[3]["args"]
        return HostSpan(
            place,
            item[3]["name"],
            item[2],
            item[3]["tid"],
            *self._seconds(item[0], item[1], scale),
            _number(args.get("External id")),
            _number(args.get("Record function id")),
            _number(args.get("correlation")),
            _number(args.get("Sequence number")),
            _number(args.get("Fwd thread id")) or 0,
            tuple(args.get("Input Dims", ())),
            tuple(DTYPES.get(kind, kind) for kind in args.get("Input type", ())),
            _collective(args),
        )

    def _device_span(self, place: int, item: tuple[Any, Any, DeviceKind, dict[str, Any]], scale: float) -> DeviceSpan:
        args = item[3]["args"]
        return DeviceSpan(
            len(self._host) + place,
            item[3]["name"],
            item[2],
            int(args["device"]),
            int(args["stream"]),
            *self._seconds(item[0], item[1], scale),
            int(args["correlation"]),
            _number(args.get("External id")),
            int(args.get("bytes", 0)),
            _collective(args),
        )


def _kept(event: dict[str, Any]) -> dict[str, Any]:
    """Keep only the fields of an event that spans need: a trace of gigabytes must not be kept whole."""
    if not isinstance(event["name"], str):
        raise TypeError("its name is no text")
    hash((event["pid"], event["tid"]))  # TypeError for invalid process or thread names
    return {"name": event["name"], "pid": event["pid"], "tid": event["tid"], "args": event.get("args") or {}}


def _host_order(span: HostSpan) -> tuple[float, int, float, int]:
    # With times in whole microseconds many spans start together; operators are numbered in the order they began.
    number = span.external if span.kind != "runtime" and span.external is not None else -1
    return span.start, number, -span.end, span.id


def _number(value: Any) -> int | None:
    """Convert an id that links events; ``None`` if there is none."""
    return None if value is None else int(value)


def _known(value: Any) -> int | None:
    return None if value is None or value in _UNKNOWN else int(value)


def _synchronization(args: Mapping[str, Any]) -> Synchronization:
    kind = _SYNC.get(args["cuda_sync_kind"], "device")
    return Synchronization(
        kind,  # type: ignore[arg-type]
        int(args["correlation"]),
        _known(args.get("stream")),
        _known(args.get("wait_on_cuda_event_record_corr_id")),
        _known(args.get("wait_on_stream")),
    )


def _collective(args: Mapping[str, Any]) -> CollectiveInfo | None:
    kind = kind_of_short(str(args.get("Collective name", "")))
    if kind is None:
        return None
    try:
        ranks = tuple(int(rank) for rank in decoded(args.get("Process Group Ranks") or "[]"))
    except MALFORMED:  # long lists are truncated with dots
        ranks = ()
    dtype = str(args.get("dtype", ""))
    return CollectiveInfo(
        kind,
        str(args.get("Process Group Name", "")),
        ranks,
        int(args.get("In msg nelems", 0)),
        NCCL_DTYPES.get(dtype, dtype.lower()),
        _known(args.get({"send": "Dst Rank", "recv": "Src Rank"}.get(kind, ""))),
    )


NCCL_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


def _process_groups(distributed: Mapping[str, Any], world: int) -> dict[str, tuple[int, ...]]:
    groups = distributed.get("pg_config") or ()
    if isinstance(groups, Mapping):
        groups = groups.values()
    return {str(group["pg_name"]): tuple(group.get("ranks") or range(world)) for group in groups if "pg_name" in group}


def _gpu(header: Mapping[str, Any], device: list[DeviceSpan]) -> str:
    used = Counter(span.device for span in device).most_common(1)
    for item in header.get("deviceProperties", ()):
        if not isinstance(item, dict) or not isinstance(item.get("id"), int | None):
            raise TypeError(f"deviceProperties has {str(item)[:40]!r}, which is no device with an id and a name")
    names = {item.get("id"): item.get("name", "") for item in header.get("deviceProperties", ())}
    return str(names.get(used[0][0] if used else 0, ""))


def _main_thread(host: list[HostSpan], pid: int) -> int:
    """Return the main thread.

    The process's first thread if it runs operators, else the one with the profiler's steps or most operators.
    """
    operators = Counter(span.thread for span in host if span.kind == "operator")
    steps = Counter(span.thread for span in host if span.name.startswith("ProfilerStep#"))
    if steps:
        return steps.most_common(1)[0][0]
    if pid in operators or not operators:
        return pid
    return operators.most_common(1)[0][0]
