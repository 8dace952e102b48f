"""Lowering of an operator trace to device work and host actions: :func:`lower`. A captured step as the predicted graph,
compiled on request, with its memory: :func:`lower_step`.

Host work belongs to units, the outermost operator calls, on their threads. Ranges marked by a person or a library
(``ProfilerStep#3``, ``Optimizer.step#AdamW.step``) are not units, but the calls in them are. The autograd engine's
``evaluate_function`` is one, as in the traces to which overheads are fitted.

NCCL runs an asynchronous collective on the stream of its communicator, after the work already on the current stream;
``wait()`` makes the current stream, not the host, wait for it. With ``async_op=False`` it runs on the current stream
itself (PyTorch 2.8 and later). Results without an explicit wait (DDP waits in C++, which recorded traces do not show)
are awaited by the first kernel that uses them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.operators.device_work import Elementwise
from e2e.lowering.families.convolutions import copied_bytes
from e2e.lowering.families.embeddings import FORWARD as LOOKUPS
from e2e.lowering.families.package_kernels import triton_product
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    UnforeseenCall,
    gpu_inputs,
    gpu_outputs,
    integers,
    is_on_gpu,
    numel,
    priced_dtype,
    size_bytes,
)
from e2e.lowering.host_operators import host_seconds
from e2e.lowering.operator_table import KEEP_OWN_WORK, TABLE, generated_kernel, is_generated, launches_nothing
from e2e.lowering.torch_compile import between_collectives, compile_rank, kept_storages
from e2e.step.collective_names import ANNOTATION, EAGER, FUNCTIONAL, OUTPUT_FIRST, SCATTER, WAIT_TENSOR, kind_of
from e2e.step.execution_graph import (
    AUTOGRAD,
    MAIN,
    UNKNOWN_PRODUCT,
    CallInfo,
    Collective,
    Duration,
    ExecutionGraph,
    HostWork,
    RankGraph,
    RankWriter,
    Task,
)
from e2e.step.memory import (
    AS_EAGER,
    KeptStorages,
    MemoryUsage,
    peak_memory,
    replayed_memory,
    tells_frees,
    workspace_bytes,
)
from e2e.step.operator_trace import (
    NUMBERS,
    OPTIMIZER_STEP,
    PRODUCTS,
    PROFILER_STEP,
    RECOMPUTED,
    TRITON,
    OperatorCall,
    OperatorTrace,
    Tensor,
    Value,
    crossed_ranges,
    gap_names,
    gathering_calls,
    list_length,
    settled_phases,
    tensors,
)
from e2e.step.options import StepOptions

# First stream of collectives, which run concurrently with computation; larger than any stream id of a trace.
FIRST_STREAM = 1_000_000


def written_storages(call: OperatorCall, kind: str) -> set[int]:
    """Return the storages that are complete only when the collective has ended."""
    if kind in ("send", "barrier"):
        return set()
    given = call.inputs[:1] if call.name.startswith(EAGER) and call.inputs else (*call.inputs, *call.outputs)
    return {tensor.storage for tensor in tensors(given) if is_on_gpu(tensor)}


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
        sent = sent_bytes(call)
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


def sent_bytes(call: OperatorCall) -> int:
    """Return the input bytes of this rank: its shard of a gather, all data that it scatters or exchanges, or the
    received bytes.
    """
    place = 1 if call.name in OUTPUT_FIRST else 0
    given: tuple[Value, ...] = call.inputs[place : place + 1] if call.name.startswith((EAGER, FUNCTIONAL)) else ()
    found = [size_bytes(tensor) for tensor in tensors(given) if is_on_gpu(tensor)]
    if call.name == SCATTER and not found:
        group = call.attributes.get("group_size", 1)
        return sum(_sizes(call.inputs)) * (group if isinstance(group, int) else 1)
    return sum(found) if found else sum(_sizes(call.inputs) or _sizes(call.outputs))


def _sizes(values: tuple[Value, ...]) -> list[int]:
    return [size_bytes(tensor) for tensor in tensors(values) if isinstance(tensor, Tensor) and is_on_gpu(tensor)]


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
            self.await_storages(written_storages(call, kind), stream)
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
        for storage in written_storages(call, kind):
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


# Duration of launches whose time is in that of another.
NO_TIME = Duration(0.0, 0.0, 0.0, "memory", "measured", 0.0)
# Profiler records per begin or end of an operator.
_HALF = 0.5
THREAD_NAMES = {0: MAIN, 1: AUTOGRAD}


def thread_of(call: OperatorCall) -> str:
    """Return the name of the thread of ``call``."""
    return THREAD_NAMES.get(call.thread, f"thread {call.thread}")


def is_annotation(call: OperatorCall) -> bool:
    """True for a marked range instead of an operator: operators have a namespace, kernels of a compiler a backend."""
    named = "::" in call.name or call.name.startswith(("cuda", "hip", ANNOTATION))
    return not named and not is_generated(call)


@dataclass
class OpenCalls:
    """Open operators inside the open unit of ``writer``, which counts each begin and end: host work around launches
    grows with them.

    A call ends when the next call is not inside it.
    """

    writer: RankWriter
    _open: list[int] = field(default_factory=list)

    def begin_unit(self, call: OperatorCall) -> None:
        """Begin the unit ``call``, whose own begin is before its first piece."""
        self._open = [call.id]
        self.writer.nested(0.0)

    def begin(self, call: OperatorCall) -> None:
        """Begin ``call`` inside the unit, and end the open calls that do not contain it."""
        while len(self._open) > 1 and self._open[-1] != call.parent:
            self._open.pop()
            self.writer.nested(_HALF)
        self._open.append(call.id)
        self.writer.nested(_HALF)

    def end_unit(self) -> None:
        """End the unit and all open calls in it."""
        if self._open:
            self.writer.nested(_HALF * len(self._open))
        self._open = []


@dataclass
class UnitGaps:
    """Names of the gaps before units of the main thread."""

    # Calls with their phases.
    infos: Mapping[int, CallInfo]
    # True if the trace has marked ranges; a capture has only phases, of which the optimizer's begins with a marked
    # range.
    recorded: bool
    _around: Sequence[str] | None = None
    _optimizing: bool = False

    def before(self, call: OperatorCall) -> tuple[str, ...]:
        """Return the names of the parts of the gap before the unit ``call``; empty if the gap is the unit's own."""
        if thread_of(call) != MAIN:
            return ()
        if not self.recorded:
            begins = self.infos[call.id].phase == "optimizer" and not self._optimizing
            self._optimizing |= begins
            return (OPTIMIZER_STEP,) if begins else ()
        told = call.attributes.get("annotations")
        now = [str(name) for name in told] if isinstance(told, tuple) else []
        before, self._around = self._around, now
        if before is None:
            # The profiler's range around a whole step does not count.
            now = [name for name in now if not name.startswith(f"{PROFILER_STEP}#")]
        return gap_names(*crossed_ranges(before or (), now))


UNKNOWN = "unknown"
# Size fields of the cost models' records; a record with a zero size is no work.
EXTENTS = ("elements", "batch", "m", "n", "k", "rows", "columns", "size_bytes", "query_length", "lookups")


def lower(trace: OperatorTrace, options: StepOptions | None = None) -> RankGraph:
    """Lower ``trace`` to tasks with their descriptions and the host's actions, without prices.

    Every launch is counted: an operator without an entry in the table becomes one task with an ``Elementwise`` record
    of kind ``unknown`` over its inputs and outputs; :func:`unknown_operators` lists them.
    """
    return _Builder(trace, options or StepOptions()).build()


def unknown_operators(graph: RankGraph, kind: str = UNKNOWN) -> Counter[str]:
    """Count the operators in ``graph`` without an entry in the table, by name."""
    return Counter(
        task.name
        for task in graph.tasks
        for record in task.operators
        if isinstance(record, Elementwise) and record.kind == kind
    )


@dataclass
class _Builder:
    trace: OperatorTrace
    options: StepOptions
    context: Context = field(init=False)
    writer: RankWriter = field(init=False)

    def __post_init__(self) -> None:
        self.context = Context(self.options, regions=self.trace.regions)
        self.by_id = {call.id: call for call in self.trace.calls}
        phases = settled_phases(self.trace.calls)
        gathered = gathering_calls(self.trace.calls, [phases[call.id] for call in self.trace.calls])
        functions = {call.id: call.functions for call in self.trace.calls}
        for call in reversed(self.trace.calls):
            if call.parent in functions:
                functions[call.parent] += functions[call.id]
        infos = {
            call.id: CallInfo(
                call.id,
                call.name,
                phases[call.id],
                call.parent,
                call.module,
                list_length(call),
                gathered.get(call.id, 0),
                RECOMPUTED in call.attributes,
                call.line,
                int(call.attributes.get(NUMBERS, 0)),  # type: ignore[arg-type]
                functions[call.id],
            )
            for call in self.trace.calls
        }
        self.writer = RankWriter(self.trace.rank, infos, ranges=self.trace.ranges)
        communicators = Communicators(self.trace.process_groups, self.trace.world_size, self.writer)
        self.order = StreamOrder(self.writer, communicators)
        self.around = self._around_collectives()
        self.parents = {call.parent for call in self.trace.calls}

    def build(self) -> RankGraph:
        work = self._device_work()
        units: set[int] = set()
        # Only recordings contain all nested operators; a capture has the outermost and some nested ones.
        recorded = any("rf_id" in call.attributes for call in self.trace.calls)
        inside = OpenCalls(self.writer) if recorded else None
        gaps = UnitGaps(self.writer.calls, recorded)
        for call in self.trace.calls:
            if call.name in (RECORD, WAIT):
                self.writer.switch(thread_of(call))
                self.order.runtime_call(call)
                continue
            if not is_annotation(call) and call.parent not in units:
                if inside is not None:
                    inside.end_unit()
                self.writer.switch(thread_of(call))
                self.writer.begin_unit(call.id, gaps.before(call))
                if inside is not None:
                    inside.begin_unit(call)
            elif inside is not None and call.parent in units:
                inside.begin(call)
            if not is_annotation(call) or call.parent in units:
                units.add(call.id)
            self._emit(call, work.get(call.id, []))
        if inside is not None:
            inside.end_unit()
        return replace(self.writer.finish(), graphs=self.trace.graphs)

    # --- launches of calls ------------------------------------------------------------------------

    def _device_work(self) -> dict[int, list[DeviceWork]]:
        """Return call -> its own work. Calls are visited in reverse, children before their parents."""
        self._note_strides()
        self.context.lookups += [call for call in self.trace.calls if call.name in LOOKUPS]
        work: dict[int, list[DeviceWork]] = {}
        launching: set[int] = set()
        for call in reversed(self.trace.calls):
            nested = call.id in launching
            own = self._own_work(call, nested)
            if own:
                work[call.id] = own
            if (own or nested or kind_of(call.name)) and call.parent is not None:
                launching.add(call.parent)
        return work

    def _note_strides(self) -> None:
        """Note the strides given by older traces, only as arguments of ``as_strided``."""
        for call in self.trace.calls:
            if call.name == "aten::as_strided" and len(call.inputs) > 2:
                for tensor in tensors(call.outputs):
                    if tensor.stride is None:
                        self.context.strides[tensor.id, tensor.storage] = integers(call.inputs[2])

    def _own_work(self, call: OperatorCall, nested: bool) -> list[DeviceWork]:
        if nested and call.name not in KEEP_OWN_WORK:
            return []
        if is_generated(call):
            return generated_kernel(call)
        if (launches_nothing(call.name) and call.name not in TABLE) or kind_of(call.name) or not _touches_gpu(call):
            return []
        lowering = TABLE.get(call.name)
        if lowering is None:
            return self._unknown(call)
        try:
            work = lowering(call, self.context)
        except (UnforeseenCall, IndexError, ValueError):
            # A call with an unsupported signature (other arguments, too few or too many) is treated as an unknown
            # operator. Errors of any other type are bugs in the table itself.
            return self._unknown(call)
        return [piece for piece in work if not (nested and piece.auxiliary) and not _is_empty(piece)]

    def _unknown(self, call: OperatorCall) -> list[DeviceWork]:
        """Return one task over all inputs and outputs; empty if the outputs are only views of the inputs."""
        inputs, outputs = gpu_inputs(call), gpu_outputs(call)
        if call.name.startswith(TRITON) and inputs:
            # Inputs and outputs are not distinguished: each tensor moves once.
            once = {tensor.id: tensor for tensor in inputs}.values()
            largest = max(once, key=numel)
            rest = sum(size_bytes(tensor) for tensor in once) - size_bytes(largest)
            width = max(size_bytes(largest) // max(numel(largest), 1), 1)
            multiplies = PRODUCTS in call.attributes
            product = triton_product(call) if multiplies else None
            if product is not None:
                return [DeviceWork(call.name, (product,))]
            kind = UNKNOWN_PRODUCT if multiplies else UNKNOWN
            record = Elementwise(kind, numel(largest), 0, 1, rest // width, priced_dtype(largest))
            return [DeviceWork(call.name, (record,))]
        shared = {tensor.storage for tensor in inputs}
        in_place = call.name.endswith("_")
        if not outputs or (not in_place and all(tensor.storage in shared for tensor in outputs)):
            return []
        largest = max(outputs, key=numel)
        read = sum(numel(tensor) for tensor in inputs)
        record = Elementwise(UNKNOWN, numel(largest), 0, len(outputs), read, priced_dtype(largest))
        return [DeviceWork(call.name, (record,))]

    # --- threads and streams -----------------------------------------------------------------

    def _emit(self, call: OperatorCall, work: list[DeviceWork]) -> None:
        kind = kind_of(call.name)
        stream = self._stream(call)
        if kind is not None and call.id not in self.around and not self._inside_collective(call):
            piece = DeviceWork(call.name, (), "collective")
            self.order.communicate(call, kind, stream, lambda on, met: self._launch(piece, call, on, met))
        if call.name in SYNCHRONIZING:
            self.order.synchronize(call)
        seconds = host_seconds(call) if call.id not in self.parents else 0.0
        if seconds:
            self.writer.append(HostWork("host", call.id, Duration(seconds, seconds, seconds, "memory", "analytic")))
        if call.name == WAIT_TENSOR or work:
            self.order.await_storages(_storages(call), stream)
        for piece in work:
            self._launch(piece, call, stream)
            if piece.synchronizes:
                self.writer.synchronize(call.id, stream=stream)

    def _launch(self, piece: DeviceWork, call: OperatorCall, stream: int, collective: Collective | None = None) -> None:
        for _ in range(piece.launches - 1):
            place = self.writer.next_task
            self.writer.launch(Task(place, piece.name, piece.kind, stream, (), NO_TIME, None, call.id))
        place = self.writer.next_task
        self.writer.launch(Task(place, piece.name, piece.kind, stream, piece.operators, None, collective, call.id))

    def _stream(self, call: OperatorCall) -> int:
        told = call.attributes.get("stream")
        return told if isinstance(told, int) and not isinstance(told, bool) else 0

    def _around_collectives(self) -> set[int]:
        """Return the functional collectives around the ``c10d`` call that carries them out."""
        found: set[int] = set()
        for call in self.trace.calls:
            parent = call.parent if call.name.startswith(EAGER) and kind_of(call.name) else None
            while parent is not None and parent not in found:
                found.add(parent)
                parent = self.by_id[parent].parent
        return found

    def _inside_collective(self, call: OperatorCall) -> bool:
        """True if the call is part of an outer collective, such as ``nccl:all_reduce`` inside ``c10d::allreduce_``."""
        parent = call.parent
        while parent is not None:
            if kind_of(self.by_id[parent].name) and parent not in self.around:
                return True
            parent = self.by_id[parent].parent
        return False


def _storages(call: OperatorCall) -> set[int]:
    found: set[int] = set()
    for values in (call.inputs, call.outputs):
        found.update(tensor.storage for tensor in tensors(values) if is_on_gpu(tensor))
    return found


def _touches_gpu(call: OperatorCall) -> bool:
    values = (*call.inputs, *call.outputs)
    return any(is_on_gpu(tensor) and _has_elements(tensor) for tensor in tensors(values))


def _is_empty(piece: DeviceWork) -> bool:
    """True if no kernel is launched, as for tensors without elements, such as the tokens of an expert that gets
    none.
    """
    return bool(piece.operators) and all(
        any(getattr(record, extent, 1) == 0 for extent in EXTENTS) for record in piece.operators
    )


def _has_elements(tensor: Tensor) -> bool:
    return 0 not in tensor.shape


_EAGER = "the script compiles its model (torch.compile), which runs eagerly here; add --compile"


@dataclass(frozen=True)
class LoweredStep:
    """Lowered step. ``graph``: without prices; ``memory``: rank of the graph -> its peak."""

    graph: ExecutionGraph
    memory: Mapping[int, MemoryUsage]
    warnings: tuple[str, ...]


def lower_step(trace: OperatorTrace, options: StepOptions, architecture: str = "ampere") -> LoweredStep:
    """Lower the step of one GPU of ``architecture``. Warnings name operations that are not predicted exactly."""
    rank = lower(trace, options)
    warnings = lowering_warnings(rank)
    kept = AS_EAGER
    if options.compile:
        kept = _kept(rank, trace, trace.regions)
        rank = compile_rank(rank, trace, trace.regions)
    elif trace.compiled:
        warnings.append(_EAGER)
    graph = ExecutionGraph((rank,), source=trace.source)
    return LoweredStep(graph, {rank.rank: memory_of(trace, architecture, kept, options)}, tuple(warnings))


def lower_ranks(
    traces: Sequence[OperatorTrace],
    multiplicity: Mapping[int, int],
    source: str,
    options: StepOptions,
    architecture: str = "ampere",
) -> LoweredStep:
    """Lower several ranks of a job, each representing as many ranks as ``multiplicity`` says.

    Compiled ranks are compiled between collectives. Repeated warnings are given once.
    """
    ranks = tuple(lower(trace, options) for trace in traces)
    warnings = dict.fromkeys(line for rank in ranks for line in lowering_warnings(rank))
    kept = [AS_EAGER] * len(ranks)
    if options.compile:
        both = [(rank, trace, between_collectives(trace)) for rank, trace in zip(ranks, traces, strict=True)]
        kept = [_kept(*each) for each in both]
        ranks = tuple(compile_rank(*each) for each in both)
    elif any(trace.compiled for trace in traces):
        warnings[_EAGER] = None
    graph = ExecutionGraph(ranks, multiplicity, source)
    memory = {
        trace.rank: memory_of(trace, architecture, each, options) for trace, each in zip(traces, kept, strict=True)
    }
    return LoweredStep(graph, memory, tuple(warnings))


def _kept(rank: RankGraph, trace: OperatorTrace, parts: Mapping[int, object] | None) -> KeptStorages:
    """Return what a compiled step keeps; where the source does not say what is compiled, what the eager step does."""
    return AS_EAGER if trace.regions is None else kept_storages(rank, trace, parts)


def memory_of(
    trace: OperatorTrace, architecture: str, kept: KeptStorages = AS_EAGER, options: StepOptions | None = None
) -> MemoryUsage:
    """Return the memory of a captured step in PyTorch's allocator on a GPU of ``architecture``; for a recorded step,
    which does not record frees, the memory of its live tensors. ``kept``: what a compiled step keeps; ``options``:
    those of the lowering, which say what convolutions copy.
    """
    if not tells_frees(trace):
        return peak_memory(trace)
    context = Context(options or StepOptions(), regions=trace.regions)
    scratch = {place: copied_bytes(call, context) for place, call in enumerate(trace.calls)}
    return replayed_memory(
        trace, workspace_bytes(architecture), kept, {at: size for at, size in scratch.items() if size}
    )


def lowering_warnings(rank: RankGraph) -> list[str]:
    """Return the warnings that name the operators without a model."""
    unknown, products = unknown_operators(rank), unknown_operators(rank, UNKNOWN_PRODUCT)
    warnings = []
    if unknown:
        warnings.append(
            f"{sum(unknown.values())} launches of operators without a model, priced by the bytes they move: "
            f"{_names(unknown)}"
        )
    if products:
        warnings.append(
            f"{sum(products.values())} launches of Triton kernels that multiply matrices of extents not known here, "
            f"priced by the bytes they move, which is too little: {_names(products)}"
        )
    return warnings


def _names(counted: Counter[str]) -> str:
    more = f" and {len(counted) - 5} more" if len(counted) > 5 else ""
    return ", ".join(f"{name} ({count})" for name, count in counted.most_common(5)) + more
