"""A step under ``torch.compile``: chains of element-wise work become one kernel each, launched by generated code.

Fusion after Inductor's rules (Ansel et al., ASPLOS 2024): producers and consumers that are element-wise,
normalisations, softmax, row reductions or copies, of the same size or broadcast to each other, with no library kernel
on any path between them. A fused kernel reads each outside input once and writes each output used outside once;
products, convolutions and attention stay library calls. In the forward pass sums of up to eight elements are unrolled
into element-wise code (``unroll_reductions_threshold``), pooling over up to 25 elements is generated code too
(``torch/_inductor/lowering.py``), and identical casts of several operators are done once (common subexpressions).

Batch norm in training, and its gradient, need sums over all images before any element is known: a separate kernel reads
the inputs of the chain before it, and the fused kernel reads them again.

Convolutions: Inductor converts whole graphs to NHWC if that is faster (:func:`compiled_layout`), after the rules of
``GraphLowering.decide_layout_opt`` (torch/_inductor/graph.py), which considers all convolutions of a graph together.

Where the source says what is compiled: a chain moves to the kernels that read it if nothing before them needs it;
losses over classes are part of the softmax's kernels, which read the scores and write no logarithms; and what the
backward pass needs is computed again there where that moves no more data than to write and read it
(AOTAutograd's partitioner, ``min_cut_rematerialization_partition``).

Products of 16 bits whose rows are not aligned, as with a vocabulary of 50,257, are computed on padded copies of their
operands (``shape_padding``) where they are large.

Not modelled: Inductor's own templates for products (``max-autotune``).

Host: generated code launches a fused kernel without PyTorch's dispatcher (only T1 and T4 of its overheads remain) and
calls library kernels through it; views and enclosing operators cost nothing. The optimizer step is unchanged.

If the parts of a model are compiled separately, nothing is fused across their borders; calls outside all parts are not
compiled. For a rank of a job such parts lie between its collectives; for a program that runs as it is they are the
calls that it compiles, in the optimizer too (Muon's), where the step of PyTorch's own optimizers is the fused form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Loss,
    Normalization,
    Pooling,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import DTYPE_BYTES, Conv2d
from e2e.lowering.families.work import priced_dtype
from e2e.step.collective_names import kind_of
from e2e.step.execution_graph import Action, HostWork, Launch, RankGraph, Task
from e2e.step.memory import KeptStorages
from e2e.step.operator_trace import MARKED_GAPS, RETURNED, OperatorCall, OperatorTrace, Tensor, tensors

# A graph with at least this many nodes per convolution is not converted.
_MOST_NODES = 300
_SMALL_CHANNELS = 64
# Ratio of the time in NHWC to that in NCHW by kind of convolution, as used by Inductor for inference.
_NHWC_OVER_NCHW = {"grouped": 1.358, "small": 0.783, "narrowing": 0.725, "other": 0.823}


def compiled_layout(rank: RankGraph, parts: Container[int] | None = None) -> RankGraph:
    """Return ``rank`` with convolutions, batch norms and pooling in NHWC if Inductor would convert the graph.

    ``parts``: calls that are compiled (None: all).
    """
    compiled = {task.id for task in rank.tasks if _is_compiled(rank, task) and (parts is None or task.call in parts)}
    if not turns_to_channels_last([task for task in rank.tasks if task.id in compiled]):
        return rank
    tasks = tuple(
        replace(task, operators=tuple(_channels_last(each) for each in task.operators)) if task.id in compiled else task
        for task in rank.tasks
    )
    return replace(rank, tasks=tasks)


def turns_to_channels_last(tasks: list[Task]) -> bool:
    """True if Inductor converts the graph of the convolutions in ``tasks``."""
    forward = [each for task in tasks for each in task.operators if isinstance(each, Conv2d)]
    if not forward or len(tasks) >= _MOST_NODES * len(forward):
        return False
    if any(isinstance(each, ConvolutionBackward) for task in tasks for each in task.operators):
        hurt = any(_is_grouped(conv) or _is_narrowing(conv) for conv in forward)
        return not hurt and not all(_is_small(conv) for conv in forward)
    flops: dict[str, int] = defaultdict(int)
    for conv in forward:
        flops[_kind(conv)] += conv.flops
    return sum(_NHWC_OVER_NCHW[kind] * count for kind, count in flops.items()) <= sum(flops.values())


def _is_compiled(rank: RankGraph, task: Task) -> bool:
    return task.call is not None and rank.calls[task.call].phase in ("forward", "backward")


def _kind(conv: Conv2d) -> str:
    if _is_grouped(conv):
        return "grouped"
    if _is_small(conv):
        return "small"
    return "narrowing" if _is_narrowing(conv) else "other"


def _is_grouped(conv: Conv2d) -> bool:
    return conv.groups > 1 and conv.in_channels > conv.groups


def _is_small(conv: Conv2d) -> bool:
    return conv.out_channels <= _SMALL_CHANNELS and conv.in_channels // conv.groups <= _SMALL_CHANNELS


def _is_narrowing(conv: Conv2d) -> bool:
    return conv.out_channels * 2 <= conv.in_channels // conv.groups and conv.kernel[0] > 1


def _channels_last(operator: AnyOperator) -> AnyOperator:
    if isinstance(operator, ConvolutionBackward):
        return replace(operator, forward=replace(operator.forward, channels_last=True))
    if isinstance(operator, (Conv2d, Pooling)) or (
        isinstance(operator, Normalization) and operator.kind == "batch_norm"
    ):
        return replace(operator, channels_last=True)
    return operator


COMPILED_PHASES = ("forward", "backward")


def _compiled_phases(trace: OperatorTrace) -> tuple[str, ...]:
    """Return the phases that are compiled; a program's own regions may be in its optimizer too."""
    return COMPILED_PHASES if trace.regions is None else (*COMPILED_PHASES, "optimizer")


_FUSIBLE = (Elementwise, Normalization, Softmax)
_COPIES = ("transpose", "concat", "strided_concat", "split")
_CASTS = ("aten::_to_copy", "aten::to")
_SMALL_TABLE = 4096  # elements of a table that stays in the cache
_ALIGNED = 8  # elements of 16 bits that products load at once
_COMPUTES = 300  # multiplications for each element moved, above which the memory limits no product on today's GPUs
# Operands of what is computed again by each kernel that reads it, and how many times as large it is.
_READS, _BROADCAST = 4, 8
_UNROLLED, _POOLED = 8, 25  # elements of an unrolled sum; elements of a generated pooling window


@dataclass(eq=False)
class _Node:
    """Call with device work."""

    call: OperatorCall
    tasks: list[Task]
    fusible: bool
    compiled: bool = True
    level: int = 0
    # True for one number from all elements: it ends its kernel, which computes what it sums.
    ends: bool = False
    # Separately compiled part of the model.
    part: object = None
    size: int = 0
    # Version of a storage -> elements and dtype.
    reads: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    writes: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    # Versions that its region returns to the program.
    returned: set[tuple[int, int]] = field(default_factory=set)
    group: _Node | None = None

    @property
    def root(self) -> _Node:
        node = self
        while node.group is not None:
            node = node.group
        return node


def compile_rank(rank: RankGraph, trace: OperatorTrace, parts: Mapping[int, object] | None = None) -> RankGraph:
    """Return ``rank``, lowered from ``trace`` and without prices, with forward and backward passes compiled.

    ``parts``: call -> its separately compiled part of the model.
    """
    rank = compiled_layout(rank, parts)
    nodes = _nodes(rank, trace, parts)
    freed = {each for call in trace.calls for each in _integers(call.attributes.get("freed"))}
    nodes, again = _generated(nodes, freed, exact=trace.regions is not None)
    members = _members(nodes)
    used = _uses(nodes)
    kernels: dict[int, tuple[Task, ...]] = {task.id: () for node in again for task in node.tasks}
    kernels |= {task.id: (_generated_pooling(task),) for node in nodes if _is_pooling(node) for task in node.tasks}
    calls = dict(rank.calls)
    for group in members.values():
        if len(group) > 1:
            kernels |= {task.id: () for node in group for task in node.tasks}
            last = replace(group[-1].tasks[-1], name=_name(group), kind="kernel")
            work: tuple[Reduction | Elementwise, ...] = (*_statistics(group), _fused(group, used, freed))
            kernels[last.id] = tuple(replace(last, operators=(each,)) for each in work)
            calls[group[-1].call.id] = replace(calls[group[-1].call.id], name=_name(group))
    kernels |= _padded_products(nodes, _compiled_phases(trace))
    return _Rewriter(replace(rank, calls=calls), kernels, _compiled_phases(trace), parts).rewrite()


def kept_storages(rank: RankGraph, trace: OperatorTrace, parts: Mapping[int, object] | None) -> KeptStorages:
    """Return what the compiled step of a program keeps in memory; arguments as for :func:`compile_rank`.

    It makes what kernels write, and keeps it until the last kernel that reads it.
    """
    nodes = _nodes(rank, trace, parts)
    freed = {each for call in trace.calls for each in _integers(call.attributes.get("freed"))}
    generated = {storage for node in nodes if node.fusible for storage, _ in node.writes}
    nodes, _ = _generated(nodes, freed, exact=True)
    used, places = _uses(nodes), {call.id: place for place, call in enumerate(trace.calls)}
    made: set[int] = set()
    read_last: dict[int, int] = {}
    for group in _members(nodes).values():
        written = _written(group, used, freed) if len(group) > 1 else group[0].writes
        made |= {storage for storage, _ in written}
    for node in nodes:
        read_last |= {storage: places[node.call.id] for storage, _ in node.reads}
        if not node.fusible:
            made |= {storage for storage, _ in node.reads}
    return KeptStorages(frozenset(generated - made), read_last)


def _generated(nodes: list[_Node], freed: set[int], *, exact: bool) -> tuple[list[_Node], set[_Node]]:
    """Return the nodes that the compiled step computes, joined into kernels, and those that it does not compute."""
    again = _not_computed(nodes, freed) if exact else _casts_again(nodes)
    nodes = [node for node in nodes if node not in again]
    _fuse(nodes)
    if exact:
        _move_to_readers(nodes)
        _compute_again(nodes)
    return nodes, again


def _members(nodes: Iterable[_Node]) -> dict[_Node, list[_Node]]:
    """Return the nodes of each kernel."""
    members: dict[_Node, list[_Node]] = defaultdict(list)
    for node in nodes:
        members[node.root].append(node)
    return members


def between_collectives(trace: OperatorTrace) -> dict[int, object]:
    """Return call -> compiled part of ``trace``, for a rank of a job.

    Dynamo leaves its code for a collective started by a hook (FSDP2), and splits it where a bucket of gradients is full
    (``DDPOptimizer``), in the backward pass as in the forward pass. What a program does not compile has no part.
    """
    parts: dict[int, object] = {}
    part = 0
    for call in trace.calls:
        part += kind_of(call.name) is not None
        if trace.regions is None:
            parts[call.id] = part
        elif call.id in trace.regions:
            parts[call.id] = part, trace.regions[call.id]
    return parts


def fused_storages(rank: RankGraph, trace: OperatorTrace, parts: Mapping[int, object] | None = None) -> set[int]:
    """Return the storages that compiled code does not need.

    Outputs of generated kernels read only by generated kernels stay in registers, and forward outputs are recomputed
    where the backward pass reads them. AOTAutograd's partitioner saves the inputs and outputs of library kernels.
    ``parts``: as in :func:`compile_rank`; data passed between parts, such as from one layer to the next, are outputs of
    compiled code and needed.
    """
    nodes = _nodes(rank, trace, parts)
    generated = {storage for node in nodes if node.fusible for storage, _ in node.writes}
    by_libraries = {
        storage for node in nodes if not node.fusible for storage, _ in (*node.reads, *node.writes)
    }  # fmt: skip
    return generated - by_libraries - _handed_on(nodes)


@dataclass(frozen=True)
class FusedChain:
    """Fused kernel ``name`` with its ``work``, replacing ``calls`` in program order."""

    name: str
    calls: tuple[int, ...]
    work: Elementwise


def fused_chains(rank: RankGraph, trace: OperatorTrace, chosen: Container[int]) -> list[FusedChain]:
    """Return the chains of the ``chosen`` calls of ``rank``, lowered from ``trace``, that would be fused by the rules
    above.

    All other calls stay unchanged between them.
    """
    nodes = _nodes(rank, trace, chosen=chosen)
    _fuse(nodes)
    members = _members(nodes)
    used = _uses(nodes)
    freed = {each for call in trace.calls for each in _integers(call.attributes.get("freed"))}
    return [
        FusedChain(_name(group), tuple(node.call.id for node in group), _fused(group, used, freed))
        for group in members.values()
        if len(group) > 1
    ]


def _handed_on(nodes: Sequence[_Node]) -> set[int]:
    """Return the storages made by one part of a model and read by another."""
    homes = {storage: _home(node) for node in nodes for storage, _ in node.writes}
    return {storage for node in nodes for storage, _ in node.reads if homes.get(storage, _home(node)) != _home(node)}


def _home(node: _Node) -> object:
    """Return the part of the model of ``node``, independent of the pass."""
    return node.part[-1] if isinstance(node.part, tuple) else node.part


# --- data flow -------------------------------------------------------------------------------------


def _nodes(
    rank: RankGraph,
    trace: OperatorTrace,
    parts: Mapping[int, object] | None = None,
    chosen: Container[int] | None = None,
) -> list[_Node]:
    """Return the calls with device work in program order, with their reads, writes and parts.

    ``chosen``: calls that may be fused (None: all).
    """
    work: dict[int, list[Task]] = defaultdict(list)
    for task in rank.tasks:
        if task.call is not None:
            work[task.call].append(task)
    phases, exact = _compiled_phases(trace), trace.regions is not None
    versions: dict[int, int] = {}
    producers: dict[tuple[int, int], _Node] = {}
    nodes: list[_Node] = []
    for traced in trace.calls:
        if traced.id not in work:
            continue
        call = replace(traced, phase=rank.calls[traced.id].phase)
        compiled = parts is None or call.id in parts
        fusible = (
            call.phase in phases
            and _is_fusible(call, work[call.id], exact)
            and compiled
            and (chosen is None or call.id in chosen)
        )
        node = _Node(call, work[call.id], fusible, compiled, part=None if parts is None else parts.get(call.id))
        for tensor in _on_device(call.inputs):
            version = (tensor.storage, versions.get(tensor.storage, -1))
            if version in producers:
                node.level = max(node.level, producers[version].level + producers[version].ends)
            elements = _distinct(tensor)
            node.reads[version] = max(
                node.reads.get(version, (0, priced_dtype(tensor))), (elements, priced_dtype(tensor))
            )
            node.size = max(node.size, elements)
        for tensor in _on_device(call.outputs):
            versions[tensor.storage] = call.id
            node.writes[tensor.storage, call.id] = (_distinct(tensor), priced_dtype(tensor))
            producers[tensor.storage, call.id] = node
            node.size = max(node.size, _distinct(tensor))
        node.level += not node.fusible
        node.ends = fusible and any(_is_total(record) for task in work[call.id] for record in task.operators)
        nodes.append(node)
    for storage in {each for call in trace.calls for each in _integers(call.attributes.get(RETURNED))}:
        version = (storage, versions.get(storage, -1))
        if version in producers:
            producers[version].returned.add(version)
    return nodes


def _casts_again(nodes: list[_Node]) -> set[_Node]:
    """Return repeated forward casts of the same data, and redirect their readers to the first cast."""
    first: dict[object, tuple[int, int]] = {}
    same: dict[tuple[int, int], tuple[int, int]] = {}
    again: set[_Node] = set()
    for node in nodes:
        for version in [version for version in node.reads if version in same]:
            size = node.reads.pop(version)
            node.reads[same[version]] = max(size, node.reads.get(same[version], size))
        if not node.fusible or node.call.name not in _CASTS or node.call.phase != "forward" or len(node.writes) != 1:
            continue
        ((version, made),) = node.writes.items()
        cast = (frozenset(node.reads.items()), made, node.part)
        if cast in first:
            same[version] = first[cast]
            again.add(node)
        else:
            first[cast] = version
    return again


def _not_computed(nodes: list[_Node], freed: set[int]) -> set[_Node]:
    """Return nodes that generated code does not compute: what it has computed before, what it computes where it is
    read, and what nobody reads then. Their readers are redirected.
    """
    gone = _computed_before(nodes)
    gone |= _inlined([node for node in nodes if node not in gone])
    while True:
        used = {version for node in nodes if node not in gone for version in node.reads}
        dead = {
            node
            for node in nodes
            if node.fusible
            and node not in gone
            and not node.returned
            and all(each not in used and each[0] in freed for each in node.writes)
        }
        if not dead:
            return gone
        gone |= dead


_RANDOM = ("rand", "dropout", "bernoulli", "normal", "uniform", "multinomial")


def _computed_before(nodes: list[_Node]) -> set[_Node]:
    """Return nodes that compute, in the same region, what another has computed before: large results only in the same
    pass, since no pass keeps them for the next one.
    """
    first: dict[object, _Node] = {}
    alike: dict[tuple[int, int], tuple[int, int]] = {}  # version -> first version with the same values
    instead: dict[tuple[int, int], tuple[int, int]] = {}
    again: set[_Node] = set()
    for node in nodes:
        for version in [version for version in node.reads if version in instead]:
            size = node.reads.pop(version)
            node.reads[instead[version]] = max(size, node.reads.get(instead[version], size))
        name = node.call.name
        if not node.fusible or name.endswith("_") or any(each in name for each in _RANDOM):
            continue
        read = tuple(alike.get(version, version) for version in node.reads)
        made = tuple(_form(each) for each in node.call.outputs)
        key = (name, read, tuple(_form(each) for each in node.call.inputs), made, _home(node))
        other = first.setdefault(key, node)
        if other is node or len(other.writes) != len(node.writes):
            continue
        pairs = dict(zip(node.writes, other.writes, strict=True))
        alike |= {mine: alike.get(its, its) for mine, its in pairs.items()}
        small = all(elements <= _SMALL_TABLE for elements, _ in node.writes.values())
        if small or (other.call.phase == node.call.phase and other not in again):
            again.add(node)
            instead |= {mine: instead.get(its, its) for mine, its in pairs.items()}
    return again


def _form(value: object) -> object:
    """Return an argument without the identity of its tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.stride, value.dtype
    return tuple(map(_form, value)) if isinstance(value, tuple) else value


def _inlined(nodes: list[_Node]) -> set[_Node]:
    """Return what only generated code of the same region reads, which computes it itself: casts, and results that are
    much larger than their few operands (``realize_reads_threshold``), such as masks and biases that are broadcast.
    Their readers read the operands.
    """
    readers: dict[tuple[int, int], list[_Node]] = defaultdict(list)
    for node in nodes:
        for version in node.reads:
            readers[version].append(node)
    inlined: set[_Node] = set()
    for node in nodes:
        if not node.fusible or len(node.writes) != 1 or not (_is_cast(node) or _is_broadcast(node)) or node.returned:
            continue
        (version,) = node.writes
        if not readers[version] or not all(each.fusible and _home(each) == _home(node) for each in readers[version]):
            continue
        for each in readers[version]:
            del each.reads[version]
            for source, size in node.reads.items():
                each.reads[source] = max(size, each.reads.get(source, size))
                readers[source].append(each)
        inlined.add(node)
    return inlined


def _is_cast(node: _Node) -> bool:
    return node.call.name in _CASTS and len(node.reads) == 1


def _is_broadcast(node: _Node) -> bool:
    """True for an element-wise result of few operands that together are much smaller."""
    name = node.call.name
    if name.endswith("_") or any(each in name for each in _RANDOM) or not 0 < len(node.reads) <= _READS:
        return False
    if not all(isinstance(each, Elementwise) for task in node.tasks for each in task.operators):
        return False
    return _BROADCAST * sum(elements for elements, _ in node.reads.values()) <= sum(
        elements for elements, _ in node.writes.values()
    )


def _is_pooling(node: _Node) -> bool:
    records = [record for task in node.tasks for record in task.operators]
    generated = all(isinstance(each, Pooling) and prod(each.kernel) <= _POOLED for each in records)
    return bool(records) and generated and node.call.phase == "forward" and node.compiled


def _generated_pooling(task: Task) -> Task:
    """Return a generated kernel that reads the image once and writes the output."""
    (pooling,) = task.operators
    assert isinstance(pooling, Pooling)
    made = pooling.batch * pooling.channels * pooling.out_height * pooling.out_width
    read = pooling.batch * pooling.channels * pooling.height * pooling.width
    record = Elementwise("fused", made, read // made, 1, read % made, pooling.dtype)
    return replace(task, name="inductor::triton_pooling", operators=(record,))


def _is_fusible(call: OperatorCall, tasks: Iterable[Task], exact: bool = False) -> bool:
    """True if a call becomes generated code. ``exact``: the source says what is compiled; then sums of whole tensors,
    losses and lookups in small tables are generated too.
    """
    if exact and call.name == "aten::index" and _distinct(next(_on_device(call.inputs))) <= _SMALL_TABLE:
        return True
    records = [(task, record) for task in tasks for record in task.operators]
    unrolled = call.phase == "forward"
    return bool(records) and all(
        task.kind == "kernel"
        and (
            _is_chain_work(record)
            or (unrolled and _is_short_sum(record))
            or (exact and (_is_total(record) or isinstance(record, Loss)))
        )
        for task, record in records
    )


def _is_total(record: object) -> bool:
    """True for sums that a kernel ends with: of all elements, or along the outer dimension."""
    return isinstance(record, Reduction) and record.outputs < record.elements and not _is_row_sum(record)


def _is_row_sum(record: Reduction) -> bool:
    return record.contiguous and record.outputs > 1


def _is_short_sum(record: object) -> bool:
    return isinstance(record, Reduction) and 1 < record.outputs < record.elements <= _UNROLLED * record.outputs


def _is_chain_work(record: object) -> bool:
    if isinstance(record, Elementwise):
        return not record.kind.startswith("unknown")
    if isinstance(record, Reduction):
        return _is_row_sum(record)
    return isinstance(record, _FUSIBLE) or (isinstance(record, Rearrangement) and record.kind in _COPIES)


def _fuse(nodes: list[_Node]) -> None:
    """Join producers and consumers; library kernels raise the level, so no path leaves a group and re-enters it.

    A sum along the outer dimension computes its elements itself only if they are not needed elsewhere, where they are
    written in another order.
    """
    producers = {version: node for node in nodes for version in node.writes}
    readers: dict[tuple[int, int], list[_Node]] = defaultdict(list)
    for node in nodes:
        for version in node.reads:
            readers[version].append(node)
    for node in nodes:
        for version in node.reads:
            other = producers.get(version)
            if node.ends and not _sums_all(node) and not all(each.ends for each in readers[version]):
                continue
            if other is not None and other is not node and _go_together(other, node):
                first, second = other.root, node.root
                if first is not second:
                    second.group = first


def _move_to_readers(nodes: list[_Node]) -> None:
    """Move chains to the level of the kernels that read them, if nothing at their own level does, and join them."""
    readers = _readers(nodes)
    for group in reversed(list(_members(nodes).values())):
        first = group[0]
        outside = [
            reader
            for node in group
            for version in node.writes
            for reader in readers[version]
            if reader.root is not first.root and reader.call.phase == first.call.phase
        ]
        if not first.fusible or not outside or any(node.ends for node in group):
            continue
        latest = min(reader.level - (not reader.fusible) for reader in outside)
        if latest > first.level:
            for node in group:
                node.level = latest
    _fuse(nodes)


def _readers(nodes: Iterable[_Node]) -> dict[tuple[int, int], list[_Node]]:
    """Return version of a storage -> nodes that read it."""
    readers: dict[tuple[int, int], list[_Node]] = defaultdict(list)
    for node in nodes:
        for version in node.reads:
            readers[version].append(node)
    return readers


def _compute_again(nodes: list[_Node]) -> None:
    """Let the backward pass compute outputs of forward kernels from what these read, where no other forward kernel
    reads them and it moves no more data. Sums are kept.
    """
    readers, members = _readers(nodes), _members(nodes)
    for group in members.values():
        if len(group) == 1 or group[0].call.phase != "forward":
            continue
        made = {version: node for node in group for version in node.writes}
        for version, node in made.items():
            later = [reader for reader in readers[version] if reader.root is not node.root]
            if not later or _is_sum(node) or not all(_may_compute(reader, node) for reader in later):
                continue
            origins = _origins(version, made)
            again = {reader.root: {known for each in members[reader.root] for known in each.reads} for reader in later}
            stored = (1 + len(again)) * _bytes([node.writes[version]])
            if stored < sum(
                _bytes(size for key, size in origins.items() if key not in known) for known in again.values()
            ):
                continue
            for reader in later:
                del reader.reads[version]
                reader.reads |= {key: max(size, reader.reads.get(key, size)) for key, size in origins.items()}
                for key in origins:
                    readers[key].append(reader)
            readers[version] = [reader for reader in readers[version] if reader.root is node.root]


def _may_compute(reader: _Node, node: _Node) -> bool:
    return reader.fusible and reader.call.phase == "backward" and _home(reader) == _home(node)


def _is_sum(node: _Node) -> bool:
    return any(isinstance(each, (Reduction, Loss)) for task in node.tasks for each in task.operators)


def _origins(version: tuple[int, int], made: Mapping[tuple[int, int], _Node]) -> dict[tuple[int, int], tuple[int, str]]:
    """Return what a kernel reads, and the sums that it writes, to compute ``version``."""
    found: dict[tuple[int, int], tuple[int, str]] = {}
    for key, size in made[version].reads.items():
        inside = made.get(key)
        known = {key: size} if inside is None or _is_sum(inside) else _origins(key, made)
        found |= {each: max(extent, found.get(each, extent)) for each, extent in known.items()}
    return found


def _sums_all(node: _Node) -> bool:
    return all(isinstance(each, Reduction) and each.outputs == 1 for task in node.tasks for each in task.operators)


def _go_together(first: _Node, second: _Node) -> bool:
    if not (first.fusible and second.fusible) or first.level != second.level or first.call.phase != second.call.phase:
        return False
    if first.part != second.part:
        return False
    small, large = sorted((first.size, second.size))
    return small > 0 and large % small == 0


def _uses(nodes: Iterable[_Node]) -> dict[tuple[int, int], set[_Node]]:
    """Return version of a storage -> groups that read it."""
    used: dict[tuple[int, int], set[_Node]] = defaultdict(set)
    for node in nodes:
        for version in node.reads:
            used[version].add(node.root)
    return used


def _fused(group: list[_Node], used: dict[tuple[int, int], set[_Node]], freed: set[int]) -> Elementwise:
    """Return one pass that reads outside inputs and writes outputs used outside. Outputs that are freed without a
    reader are not written.
    """
    made = {version for node in group for version in node.writes}
    reads: dict[tuple[int, int], tuple[int, str]] = {}
    for node in group:
        for version, size in node.reads.items():
            if version not in made:
                reads[version] = max(reads.get(version, size), size)
    writes = _written(group, used, freed)
    elements = max(node.size for node in group)
    dtype = max((*reads.values(), *writes.values()), default=(0, "float32"))[1]
    width = DTYPE_BYTES.get(dtype, 4)
    read, written = (_bytes(each.values()) // width for each in (reads, writes))
    inputs, outputs = read // elements, written // elements
    rest = read - inputs * elements + written - outputs * elements
    return Elementwise("fused", elements, inputs, outputs, rest, dtype)


def _written(
    group: list[_Node], used: dict[tuple[int, int], set[_Node]], freed: set[int]
) -> dict[tuple[int, int], tuple[int, str]]:
    """Return the outputs of a kernel that are used outside it, returned, or neither used nor freed."""
    root = group[0].root
    return {
        version: size
        for node in group
        for version, size in node.writes.items()
        if used[version] - {root} or version in node.returned or (not used[version] and version[0] not in freed)
    }


def _padded_products(nodes: Iterable[_Node], phases: tuple[str, ...]) -> dict[int, tuple[Task, ...]]:
    """Return task -> copies of operands with padded rows, and the product of the padded operands.

    An operand that several products need padded is copied once.
    """
    kernels: dict[int, tuple[Task, ...]] = {}
    copied: set[tuple[tuple[int, int], int]] = set()
    for node in nodes:
        if not node.compiled or node.call.phase not in phases:
            continue
        for task in node.tasks:
            gemm = task.operators[0] if len(task.operators) == 1 else None
            if not isinstance(gemm, Gemm) or not _is_padded(gemm):
                continue
            m, n, k = (_ALIGNED * ceil(each / _ALIGNED) for each in (gemm.m, gemm.n, gemm.k))
            sizes = {gemm.m * gemm.k: (m, k) != (gemm.m, gemm.k), gemm.k * gemm.n: (k, n) != (gemm.k, gemm.n)}
            copies = []
            for version, (elements, _) in node.reads.items():
                if sizes.get(elements // gemm.batch) and (version, elements) not in copied:
                    copied.add((version, elements))
                    copy = Elementwise("fused", elements, dtype=gemm.dtype)
                    copies.append(replace(task, name="inductor::triton_pad", kind="kernel", operators=(copy,)))
            kernels[task.id] = (*copies, replace(task, operators=(replace(gemm, m=m, n=n, k=k),)))
    return kernels


def _is_padded(gemm: Gemm) -> bool:
    """Return whether generated code pads a product: its rows do not begin at multiples of 16 bytes, and it computes
    more than it moves (``shape_padding``; ``should_pad_common`` in torch/_inductor/fx_passes/pad_mm.py, which then
    measures both).
    """
    if DTYPE_BYTES.get(gemm.dtype) != 2 or not any(each % _ALIGNED for each in (gemm.m, gemm.n, gemm.k)):
        return False
    intensity = 1 / (1 / gemm.m + 1 / gemm.n + 1 / gemm.k)
    return intensity > _COMPUTES


def _bytes(sizes: Iterable[tuple[int, str]]) -> int:
    return sum(elements * DTYPE_BYTES.get(dtype, 4) for elements, dtype in sizes)


def _statistics(group: list[_Node]) -> Iterator[Reduction]:
    """Iterate over the sums over whole channels required by batch norms in ``group``; each reads the outside inputs of
    the chain before it.
    """
    leading: dict[tuple[int, int], dict[tuple[int, int], tuple[int, str]]] = {}
    for node in group:
        reads = {
            outside: size
            for version, known in node.reads.items()
            for outside, size in leading.get(version, {version: known}).items()
        }
        leading |= dict.fromkeys(node.writes, reads)
        for norm in (each for task in node.tasks for each in task.operators):
            if isinstance(norm, Normalization) and norm.kind == "batch_norm" and norm.takes_statistics:
                elements = _bytes(reads.values()) // DTYPE_BYTES[norm.dtype]
                yield Reduction("statistics", elements, 2 * norm.columns, norm.dtype, not norm.channels_last)


def _name(group: list[_Node]) -> str:
    """Return the kernel's name in Inductor's scheme, from its operators."""
    names = dict.fromkeys(node.call.name.rpartition("::")[2].strip("_") for node in group)
    return "inductor::" + "_".join(("triton_fused", *names))


def _on_device(values: tuple[object, ...]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors(values) if tensor.device != "cpu" and prod(tensor.shape))  # type: ignore[arg-type]


def _distinct(tensor: Tensor) -> int:
    """Return the number of elements without those repeated by a stride of zero."""
    strides = tensor.stride or (1,) * len(tensor.shape)
    return prod(extent for extent, stride in zip(tensor.shape, strides, strict=False) if stride)


def _integers(value: object) -> Iterator[int]:
    return (each for each in value if isinstance(each, int)) if isinstance(value, tuple) else iter(())


# --- host ------------------------------------------------------------------------------------------


@dataclass
class _Rewriter:
    """Rewriter of launches and host work of a rank."""

    rank: RankGraph
    # Task -> launches that replace it; other tasks are launched as before.
    kernels: dict[int, tuple[Task, ...]]
    phases: tuple[str, ...]
    # Calls that are compiled (None: all).
    parts: Mapping[int, object] | None = None
    tasks: list[Task] = field(default_factory=list)
    called: int = 0  # calls made by generated code

    def rewrite(self) -> RankGraph:
        threads = {name: tuple(self._actions(actions)) for name, actions in self.rank.threads.items()}
        eager = sum(
            not self._is_compiled(call) and info.name not in MARKED_GAPS for call, info in self.rank.calls.items()
        )
        return replace(self.rank, threads=threads, tasks=tuple(self.tasks), operator_calls=eager + self.called)

    def _actions(self, actions: tuple[Action, ...]) -> Iterator[Action]:
        """Replace the overheads of compiled calls by those of the new launches; all other actions stay in order."""
        open_call: int | None = None
        for action in actions:
            if isinstance(action, HostWork) and self._is_compiled(action.call):
                continue
            launched = self._launched(action)
            if open_call is not None and all(task.call != open_call for task in launched):
                yield HostWork("T3", open_call)
                open_call = None
            if not isinstance(action, Launch):
                yield action
            for task in launched:
                if self._is_compiled(task.call):
                    if task.call == open_call:
                        yield HostWork("T5", open_call)
                    else:
                        self.called += 1
                        yield HostWork("T1", task.call)
                        if task.id not in self.kernels:
                            yield HostWork("T2", task.call)
                            open_call = task.call
                assert isinstance(action, Launch)
                yield Launch(len(self.tasks), action.duration)
                self.tasks.append(replace(task, id=len(self.tasks)))
        if open_call is not None:
            yield HostWork("T3", open_call)

    def _launched(self, action: Action) -> tuple[Task, ...]:
        if not isinstance(action, Launch):
            return ()
        return self.kernels.get(action.task, (self.rank.tasks[action.task],))

    def _is_compiled(self, call: int | None) -> bool:
        if call is None or (self.parts is not None and call not in self.parts):
            return False
        return self.rank.calls[call].phase in self.phases
