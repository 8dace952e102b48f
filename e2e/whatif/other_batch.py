"""A step with another batch size: its operators resized, and a recorded graph with the kernels of the other batch.

The batch is identified in the input tensors of a step and propagated from call to call through their results; then
every tensor that depends on it is resized.

Input tensors are those that no call made and that are not weights (no optimizer updates them, no operator uses them as
weights, statistics or tables). The batch is the most frequent leading size of those with several dimensions, or of all
if there are none; for a step with another batch the user gives it (``batch=32:512``). Results follow from arguments by
the rules of :mod:`e2e.whatif.shape_rules`; those of operators without a rule, from the results of nested calls. Values
that depend on the batch without being computed from inputs (sizes written in a script) are taken for the batch if they
are leading sizes and equal to it.

Measured times of a recorded graph are scaled by the ratio of the models' estimates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from costmodel.operators.any_operator import AnyOperator
from e2e.price.collective_pricing import NodeLayout, price_collectives
from e2e.price.recorded_kernels import tasks_behind
from e2e.step.collective_names import OUTPUT_FIRST, kind_of
from e2e.step.execution_graph import Duration, ExecutionGraph, RankGraph, Task
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor, Value, tensors
from e2e.whatif.extents import Extents, SplitError, any_grows, fixed, grows, proportional, reshaped, size_at, stride_at
from e2e.whatif.shape_rules import ShapedCall, aligned, indices_of, is_factory, rule_of
from e2e.whatif.traced_rank import TracedRank

# Positions of arguments that are weights, tables or statistics, whatever their sizes.
_WEIGHTS: dict[str, tuple[int, ...]] = {
    "linear": (1, 2),
    "addmm": (0, 2),
    "mm": (1,),
    "embedding": (0,),
    "embedding_bag": (0,),
    "_embedding_bag": (0,),
    "_embedding_bag_forward_only": (0,),
    "table_batched_embedding": (0,),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "conv2d", "conv1d", "conv3d"), (1, 2)),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "batch_norm", "_batch_norm_impl_index"), (1, 2, 3, 4)),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), (1, 2, 3)),
    **dict.fromkeys(("group_norm", "native_group_norm"), (1, 2, 3)),
}
# Operators with arguments that are sizes of the result.
_SIZED = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "expand", "zeros", "ones", "full", "empty", "rand", "randn", "new_zeros",
        "new_ones", "new_full", "new_empty", "empty_strided", "new_empty_strided", "select_backward", "slice_backward",
        "_reshape_alias", "broadcast_to", "arange",
    )
)  # fmt: skip
# Batched lookups: position of the argument with the number of samples.
_TABLES = {"e2e::table_batched_embedding": 4, "e2e::table_batched_embedding_backward": 5}


def recorded_batch(trace: OperatorTrace) -> int:
    """Return the number of samples of a recorded step; raises ``InputError`` naming the tensors if these disagree."""
    begins = _begins(trace)
    tables = [(call, tensor) for call, tensor in begins if len(tensor.shape) > 1 and tensor.shape[0] > 1]
    begins = tables or begins
    votes = Counter(tensor.shape[0] for _, tensor in begins if tensor.shape[0] > 1)
    if not votes:
        if begins and any(len(tensor.shape) > 1 for _, tensor in begins):
            return 1
        raise InputError(
            f"{trace.source}: no tensor that the step begins with tells its batch; say it, such as batch=32:512"
        )
    (best, count), *others = votes.most_common(2)
    if others and others[0][1] == count:
        names = [next(_told(call, tensor) for call, tensor in begins if tensor.shape[0] == size)
                 for size in (best, others[0][0])]  # fmt: skip
        raise InputError(
            f"{trace.source}: the batch may be {best} ({names[0]}) or {others[0][0]} ({names[1]}); say which, such as "
            f"batch={best}:{2 * best}"
        )
    return best


def resized(trace: OperatorTrace, samples: int, recorded: int | None = None) -> OperatorTrace:
    """Return ``trace`` of a step with ``samples`` instead of ``recorded`` samples (``None``: :func:`recorded_batch`).

    Raises ``InputError`` naming the call and the tensor if a size may depend on the batch in several ways, and if
    nothing depends on it.
    """
    batch = recorded_batch(trace) if recorded is None else recorded
    sizes = _Sizes(trace, batch)
    if not sizes.any_grew:
        raise InputError(
            f"{trace.source}: no tensor that the step begins with has {batch} samples in front; "
            "give the batch that was recorded"
        )
    more = samples - batch
    return replace(trace, calls=tuple(_resized_call(call, sizes, more) for call in trace.calls))


def _told(call: OperatorCall, tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} of {call.name}"


def _weights(trace: OperatorTrace) -> set[int]:
    """Storages that are not step inputs: weight arguments, and everything that the optimizer uses.

    Views of a weight (``t``) are included.
    """
    found = {
        tensor.storage
        for call in trace.calls
        if call.phase == "optimizer"
        for tensor in tensors((*call.inputs, *call.outputs))
    }
    made: set[int] = set()
    for call in trace.calls:
        short = call.name.rpartition("::")[2]
        forward = call.phase not in ("backward", "optimizer")
        for place in _WEIGHTS.get(short, ()) if forward else ():
            value = call.inputs[place] if place < len(call.inputs) else None
            if isinstance(value, Tensor) and value.storage not in made:
                found.add(value.storage)
        read = {tensor.storage for tensor in tensors(call.inputs)}
        made |= {tensor.storage for tensor in tensors(call.outputs)} - read
    return found


def _begins(trace: OperatorTrace) -> list[tuple[OperatorCall, Tensor]]:
    """Return each tensor with dimensions that the forward pass reads, that no call made and that is no weight."""
    weights = _weights(trace)
    made: set[int] = set()
    seen: set[int] = set()
    found = []
    for call in trace.calls:
        for tensor in tensors(call.inputs):
            new = tensor.storage not in made and tensor.storage not in weights and tensor.storage not in seen
            if new and tensor.shape and call.phase not in ("backward", "optimizer"):
                seen.add(tensor.storage)
                if 0 not in tensor.shape:
                    found.append((call, tensor))
        made |= {tensor.storage for tensor in tensors(call.outputs)}
    return found


@dataclass
class _Sizes:
    """Extents of every tensor of ``trace`` at every call, visited in the order in which calls end."""

    trace: OperatorTrace
    batch: int
    any_grew: bool = False
    of_call: dict[int, dict[int, Extents]] = field(default_factory=dict)  # call -> id of the value -> extents

    def __post_init__(self) -> None:
        self._known: dict[int, Extents] = {}  # tensor -> extents
        self._by_storage: dict[int, tuple[tuple[int, ...], Extents]] = {}
        self._empty: set[int] = set()  # tensors made from sizes alone
        self._made_by: dict[int, int] = {}  # tensor -> place of the call that made it
        self._begins = {tensor.storage for _, tensor in _begins(self.trace)}
        self._places = {call.id: place for place, call in enumerate(self.trace.calls)}
        self._lookups = _index_storages(self.trace)
        for call in _by_end(self.trace.calls):
            self._visit(call)

    def _visit(self, call: OperatorCall) -> None:
        kept = self.of_call.setdefault(call.id, {})
        if call.phase == "optimizer":
            return
        for tensor in tensors(call.inputs):
            kept[id(tensor)] = self._of(tensor)
        if call.name in OUTPUT_FIRST:
            self._receive(call)
        shaped = ShapedCall(call, self._of, self.batch)
        for tensor in tensors(call.outputs):
            extents = self._made(shaped, tensor)
            if tuple(size_at(extent, 0) for extent in extents) != tensor.shape:
                extents = fixed(tensor.shape)
            kept[id(tensor)] = extents
            self._known[tensor.id] = extents
            self._by_storage[tensor.storage] = (tensor.shape, extents)
            (self._empty.add if is_factory(call.name) else self._empty.discard)(tensor.id)
            self._made_by[tensor.id] = max(self._places[call.id], self._made_by.get(tensor.id, 0))

    def _of(self, tensor: Tensor) -> Extents:
        """Return the extents of a tensor; if it is a step input, infer them from its shape."""
        known = self._known.get(tensor.id)
        if known is not None and _sizes(known) == tensor.shape:
            return known
        shape, extents = self._by_storage.get(tensor.storage, (None, ()))
        if shape is not None and prod(shape) == prod(tensor.shape):
            try:
                found = extents if shape == tensor.shape else reshaped(extents, tensor.shape, self.batch)
            except SplitError:
                found = fixed(tensor.shape)
        else:
            found = self._begun(tensor)
        self._known[tensor.id] = found
        return found

    def _begun(self, tensor: Tensor) -> Extents:
        shape = tensor.shape
        if tensor.storage not in self._begins or not shape:
            return fixed(shape)
        # With a batch of 1, any size 1 may be the batch; masks are broadcast along theirs.
        if shape[0] == self.batch and (self.batch > 1 or (len(shape) > 1 and tensor.dtype != "bool")):
            found: Extents = (proportional(shape[0], self.batch), *fixed(shape[1:]))
        elif tensor.storage in self._lookups:
            found = self._indices(tensor)
        else:
            return fixed(shape)
        self.any_grew = True
        return found

    def _indices(self, tensor: Tensor) -> Extents:
        """Extents of the indices of a lookup: proportional to the batch along the only dimension that can be."""
        if len(tensor.shape) == 1:
            return (proportional(tensor.shape[0], self.batch),)
        fitting = [
            place
            for place, size in enumerate(tensor.shape)
            if size >= self.batch and (size % self.batch == 0 or (size - 1) % self.batch == 0)
        ]
        if len(fitting) > 1:
            fitting = [place for place in fitting if tensor.shape[place] == self._lookups[tensor.storage]] or fitting
        if len(fitting) != 1:
            if not fitting:
                return fixed(tensor.shape)
            raise InputError(
                f"{self.trace.source}: {tensor.dtype} {list(tensor.shape)} are indices of a lookup, and which of "
                f"their dimensions the batch of {self.batch} is in is not told; capture or record another batch"
            )
        sizes = list(fixed(tensor.shape))
        sizes[fitting[0]] = proportional(tensor.shape[fitting[0]], self.batch)
        return tuple(sizes)

    def _made(self, shaped: ShapedCall, tensor: Tensor) -> Extents:
        call = shaped.call
        arguments = [each for each in tensors(call.inputs) if each.shape or not tensor.shape]
        if any(each.id == tensor.id and each.shape == tensor.shape for each in arguments):
            return aligned([self._of(each) for each in arguments if each.shape == tensor.shape], tensor.shape)
        if kind_of(call.name):
            return self._exchanged(call, tensor)
        # Nested calls begin after this one. Their results count if this one has no rule, except for empty memory.
        inside = tensor.id in self._known and self._made_by.get(tensor.id, -1) > self._places[call.id]
        try:
            rule = rule_of(call.name)
            if rule is not None:
                return rule(shaped, tensor)
        except SplitError as error:
            raise InputError(
                f"{self.trace.source}: {call.name} makes {tensor.dtype} {list(tensor.shape)}: {error}; "
                "this step cannot be resized; capture or record another batch"
            ) from None
        except (LookupError, ValueError, TypeError):
            pass
        if inside and tensor.id not in self._empty:
            return self._of(tensor)
        return self._aligned(call, arguments, tensor)

    def _aligned(self, call: OperatorCall, arguments: Sequence[Tensor], tensor: Tensor) -> Extents:
        """Align like broadcasting; else match dimensions from the left, else by size where that is unambiguous."""
        known = [self._of(each) for each in arguments]
        if not any(any_grows(each) for each in known):
            return fixed(tensor.shape)
        same = [each for each in known if _sizes(each) == tensor.shape]
        if same:
            return aligned(same, tensor.shape)
        if any(len(each) == len(tensor.shape) for each in known):
            return aligned(known, tensor.shape)
        growing = [each for each in known if any_grows(each)]
        if len(tensor.shape) == 1 and tensor.dtype in ("int32", "int64") and tensor.shape[0] >= self.batch:
            return (proportional(tensor.shape[0], self.batch),)
        found = list(fixed(tensor.shape))
        for place, size in enumerate(tensor.shape):
            left = [each[place] for each in growing if place < len(each) and size_at(each[place], 0) == size]
            if left:
                found[place] = next((each for each in left if grows(each)), left[0])
        return tuple(found)

    def _receive(self, call: OperatorCall) -> None:
        """Set the extents of buffers that a collective fills in proportion to its input."""
        if not any(any_grows(self._of(each)) for each in tensors(call.inputs[1:2])):
            return
        for tensor in tensors(call.inputs[:1]):
            if tensor.shape and tensor.shape[0] % self.batch == 0 and not any_grows(self._of(tensor)):
                extents = (proportional(tensor.shape[0], self.batch), *fixed(tensor.shape[1:]))
                self.of_call[call.id][id(tensor)] = self._known[tensor.id] = extents
                self._by_storage[tensor.storage] = (tensor.shape, extents)

    def _exchanged(self, call: OperatorCall, tensor: Tensor) -> Extents:
        """Return the extents of a collective's output, which depends on the batch as its input does."""
        put = [self._of(each) for each in tensors(call.inputs)]
        same = [each for each in put if _sizes(each) == tensor.shape]
        if same or not tensor.shape:
            return aligned(same, tensor.shape)
        if any(any_grows(each) for each in put) and tensor.shape[0] % self.batch == 0:
            return (proportional(tensor.shape[0], self.batch), *fixed(tensor.shape[1:]))
        return fixed(tensor.shape)


def _sizes(extents: Extents) -> tuple[int, ...]:
    return tuple(size_at(extent, 0) for extent in extents)


def _by_end(calls: Sequence[OperatorCall]) -> Iterator[OperatorCall]:
    """Yield calls, given in order of their begin, in order of their end: enclosing calls after nested ones."""
    waiting: list[OperatorCall] = []
    for call in calls:
        while waiting and waiting[-1].id != call.parent:
            yield waiting.pop()
        waiting.append(call)
    while waiting:
        yield waiting.pop()


def _index_storages(trace: OperatorTrace) -> dict[int, int]:
    """Map storages of indices and offsets of pooled lookups to the number of lookups."""
    found: dict[int, int] = {}
    for call in trace.calls:
        if call.phase in ("backward", "optimizer"):
            continue
        for tensor in indices_of(call):
            if tensor.shape:
                found.setdefault(tensor.storage, tensor.shape[-1])
    return found


def _resized_call(call: OperatorCall, sizes: _Sizes, more: int) -> OperatorCall:
    known = sizes.of_call.get(call.id, {})
    if not any(any_grows(extents) for extents in known.values()):
        return call
    outputs = tuple(_value(value, known, more) for value in call.outputs)
    inputs = tuple(_value(value, known, more) for value in call.inputs)
    if call.name in _SIZED:
        before = next(tensors(call.outputs), None)
        after = next(tensors(outputs), None)
        if before is not None and after is not None:
            inputs = tuple(_size_list(value, before.shape, after.shape) for value in inputs)
    if call.name in _TABLES:
        place = _TABLES[call.name]
        batch = inputs[place]
        assert isinstance(batch, int)
        inputs = (*inputs[:place], batch + batch // sizes.batch * more, *inputs[place + 1 :])
    attributes = {
        name: _value(value, known, more) if isinstance(value, Tensor | tuple) else value
        for name, value in call.attributes.items()
    }
    return replace(call, inputs=inputs, outputs=outputs, attributes=attributes)


def _size_list(value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> Value:
    """Replace a list of the result's old sizes by the new ones; ``-1`` stays."""
    if not isinstance(value, tuple) or len(value) != len(before):
        return value
    fits = all(
        isinstance(each, int) and each in (-1, size) for each, size in zip(value, before, strict=True)
    )  # fmt: skip
    return tuple(each if each == -1 else size for each, size in zip(value, after, strict=True)) if fits else value


def _value(value: Value, known: dict[int, Extents], more: int) -> Value:
    if isinstance(value, Tensor):
        extents = known.get(id(value))
        if extents is None or not any_grows(extents):
            return value
        shape = tuple(size_at(extent, more) for extent in extents)
        stride = None if value.stride is None else stride_at(value.shape, value.stride, shape)
        return replace(value, shape=shape, stride=stride)
    return tuple(_value(each, known, more) for each in value) if isinstance(value, tuple) else value


@dataclass
class Estimates:
    """Cache of a cost model's estimates, each operator estimated once."""

    model: CostModel

    def __post_init__(self) -> None:
        self._known: dict[AnyOperator, Estimate] = {}

    def sums(self, operators: Sequence[AnyOperator]) -> tuple[float, float, float]:
        """Return the total (seconds, lower bound, upper bound) of the operators run one after another."""
        new = [each for each in dict.fromkeys(operators) if each not in self._known]
        if new:
            self._known |= dict(zip(new, self.model.estimate(new), strict=True))
        found = [self._known[each] for each in operators]
        return (
            sum(each.seconds for each in found),
            sum(each.lower for each in found),
            sum(each.upper for each in found),
        )

    def ratio(self, before: Sequence[AnyOperator], after: Sequence[AnyOperator]) -> tuple[float, float, float]:
        """Return the ratio of the time of ``after`` to that of ``before``, with lower and upper bound.

        Only the interval of ``after`` counts, as for another GPU (:mod:`e2e.price.recorded_kernels`). All are 1 if
        nothing is known of ``before``.
        """
        known = self.sums(before)[0]
        if not known:
            return 1.0, 1.0, 1.0
        seconds, lower, upper = self.sums(after)
        return seconds / known, lower / known, upper / known


def resized_graph(
    graph: ExecutionGraph,
    before: Mapping[int, TracedRank],
    after: Mapping[int, TracedRank],
    estimates: Estimates,
    transfers: Callable[[], tuple[NodeLayout, CostModel]],
) -> ExecutionGraph:
    """Convert ``graph``, whose tasks and calls are those of ``before``, to a step with the operators ``after``.

    Times of measured kernels are multiplied by the ratio of the estimates, unmeasured kernels get their new operators,
    collectives their new sizes; times of measured collectives are multiplied by the ratio predicted by the cost model
    of ``transfers``. Kernels of unknown operators are unchanged. The share of a measured time in which a kernel waits
    for its launch does not grow.
    """
    made = replace(
        graph,
        ranks=tuple(
            _resized_rank(rank, before[rank.rank], after[rank.rank], estimates) if rank.rank in before else rank
            for rank in graph.ranks
        ),
    )
    changed = {
        (rank.rank, task.id)
        for rank, old in zip(made.ranks, graph.ranks, strict=True)
        for task, was in zip(rank.tasks, old.tasks, strict=True)
        if task.collective != was.collective and was.duration is not None
    }
    if not changed:
        return made
    return _with_transfers(graph, made, changed, *transfers())


def _resized_rank(rank: RankGraph, before: TracedRank, after: TracedRank, estimates: Estimates) -> RankGraph:
    behind = tasks_behind(rank, before.lowered)
    homes = before.homes(rank)
    of_call: dict[int, list[Task]] = {}
    for task in after.lowered.tasks:
        if task.call is not None:
            of_call.setdefault(task.call, []).append(task)

    def one(task: Task) -> Task:
        call = homes.get(task.id)
        if call is None:
            return task
        if task.collective is not None:
            return _resized_collective(task, before.work.get(call, ()), of_call.get(call, ()))
        old = behind.get(task.id, ())
        new = _counterparts(old, before.work[call], of_call.get(call, []))
        records = tuple(record for each in new for record in each.operators)
        if task.duration is None:
            return replace(task, operators=records) if task.operators else task
        known = tuple(record for each in old for record in each.operators)
        if not known or known == records:
            return task
        seconds = task.duration.seconds
        likely, lower, upper = (seconds * ratio for ratio in estimates.ratio(known, records))
        scaled = Duration(likely, lower, upper, "scaled by its operator", "fitted")
        return replace(task, duration=scaled, operators=records if task.operators else ())

    return replace(rank, tasks=tuple(one(task) for task in rank.tasks))


def _counterparts(old: Sequence[Task], all_old: Sequence[Task], all_new: Sequence[Task]) -> Sequence[Task]:
    """Return the launches of a call with the new batch at the places of ``old``; all if their number differs."""
    if len(all_old) != len(all_new):
        return all_new
    places = {task.id: place for place, task in enumerate(all_old)}
    return [all_new[places[task.id]] for task in old]


def _resized_collective(task: Task, old: Sequence[Task], new: Sequence[Task]) -> Task:
    """Scale the bytes of ``task`` by the ratio of the sizes of the operators' collectives."""
    first = next((each.collective for each in old if each.collective), None)
    second = next((each.collective for each in new if each.collective), None)
    if first is None or second is None or task.collective is None or not first.size_bytes:
        return task
    ratio = second.size_bytes / first.size_bytes
    taken = task.collective.received_bytes
    if ratio == 1:
        return task
    sized = replace(
        task.collective,
        size_bytes=round(task.collective.size_bytes * ratio),
        received_bytes=None if taken is None else round(taken * ratio),
    )
    return replace(task, collective=sized)


def _with_transfers(
    before: ExecutionGraph,
    after: ExecutionGraph,
    changed: set[tuple[int, int]],
    layout: NodeLayout,
    model: CostModel,
) -> ExecutionGraph:
    """Multiply the times of measured collectives by the ratio of the predicted times of both sizes."""

    def predicted(graph: ExecutionGraph) -> ExecutionGraph:
        ranks = tuple(
            replace(
                rank,
                tasks=tuple(
                    replace(task, duration=None) if (rank.rank, task.id) in changed else task for task in rank.tasks
                ),
            )
            for rank in graph.ranks
        )
        return price_collectives(replace(graph, ranks=ranks), layout, model)

    old, new = predicted(before), predicted(after)
    ranks = []
    for rank, known, small, large in zip(after.ranks, before.ranks, old.ranks, new.ranks, strict=True):
        tasks = []
        for task, was, first, second in zip(rank.tasks, known.tasks, small.tasks, large.tasks, strict=True):
            if (rank.rank, task.id) in changed and was.duration and first.duration and second.duration:
                ratio = second.duration.seconds / first.duration.seconds if first.duration.seconds else 1.0
                seconds = was.duration.seconds * ratio
                scaled = Duration(seconds, seconds, seconds, "scaled by its size", "fitted")
                task = replace(task, duration=scaled)
            tasks.append(task)
        ranks.append(replace(rank, tasks=tuple(tasks)))
    return replace(after, ranks=tuple(ranks))
