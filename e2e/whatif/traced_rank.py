"""Operators of a rank behind the tasks of its graph, and several of its calls replaced by a single one.

:class:`TracedRank` maps tasks, predicted or recorded, to their operators, and those to tensors and names. Calls that
one kernel can replace are chains of element-wise operators, and lookups in several tables; :func:`merge_calls` removes
their launches and the host work around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodel.cost_model import CostModel, Estimate
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.lookups import EmbeddingLookup, TableLookup
from e2e.lowering.families.embeddings import update_work
from e2e.lowering.families.work import Context, DeviceWork, fill
from e2e.lowering.lower_trace import lower
from e2e.lowering.torch_compile import fused_chains
from e2e.price.recorded_kernels import described_call
from e2e.step.collective_names import kind_of
from e2e.step.execution_graph import Action, CallInfo, Duration, HostWork, Launch, RankGraph, Task
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor, tensors
from e2e.step.options import StepOptions


@dataclass(frozen=True)
class TracedRank:
    """Operators of a rank, to whose calls the tasks and host work of its graph refer.

    ``merged``: call -> calls whose work it now does, including itself.
    """

    trace: OperatorTrace
    options: StepOptions
    merged: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def lowered(self) -> RankGraph:
        """Lowered operators: their launches, not priced."""
        return lower(self.trace, self.options)

    @cached_property
    def calls(self) -> Mapping[int, OperatorCall]:
        """Operator calls by number."""
        return {call.id: call for call in self.trace.calls}

    @cached_property
    def work(self) -> Mapping[int, tuple[Task, ...]]:
        """Call -> tasks, for calls that launch something themselves."""
        found: dict[int, list[Task]] = {}
        for task in self.lowered.tasks:
            if task.call is not None:
                found.setdefault(task.call, []).append(task)
        return {call: tuple(tasks) for call, tasks in found.items()}

    def homes(self, rank: RankGraph) -> dict[int, int]:
        """Map tasks of ``rank`` to the calls that launch them, as far as these are known operators."""
        found: dict[int, int] = {}
        for task in rank.tasks:
            call = described_call(task.call, rank.calls, self.work)
            if call is not None:
                found[task.id] = call
        return found

    def matching(self, pattern: str) -> set[int]:
        """Return the launching calls that match ``pattern``.

        Names of the call and of enclosing calls and the module path are searched.
        """
        search = re.compile(pattern, re.IGNORECASE).search
        return {call for call in self.work if call in self.calls and any(search(name) for name in self._names(call))}

    def single(self, calls: Iterable[int]) -> set[int]:
        """Return those of ``calls`` that have not been merged."""
        return set(calls) - {call for members in self.merged.values() for call in members}

    def reads(self, call: int) -> set[int]:
        """Return the storages that the call may read."""
        members = self.merged.get(call, (call,))
        return {storage for each in members for storage in read_by(self.calls[each])}

    def writes(self, call: int) -> set[int]:
        """Return the storages that the call writes."""
        members = self.merged.get(call, (call,))
        return {storage for each in members for storage in written_by(self.calls[each])}

    def _names(self, call: int) -> Iterator[str]:
        current: int | None = call
        while current is not None and current in self.calls:
            yield self.calls[current].name
            current = self.calls[current].parent
        if self.calls[call].module:
            yield self.calls[call].module


def read_by(call: OperatorCall) -> set[int]:
    """Return the storages that the call may read."""
    return {tensor.storage for tensor in tensors(call.inputs) if tensor.device != "cpu"}


def written_by(call: OperatorCall) -> set[int]:
    """Return the storages that the call writes: its outputs.

    Its inputs too for collectives and calls without outputs.
    """
    values = (*call.outputs, *call.inputs) if kind_of(call.name) or not call.outputs else call.outputs
    return {tensor.storage for tensor in tensors(values) if tensor.device != "cpu"}


def operator_names(ranks: Collection[TracedRank]) -> list[str]:
    """Names of the operators that launch something, the most frequent first."""
    counts: dict[str, int] = {}
    for rank in ranks:
        for call, tasks in rank.work.items():
            if call in rank.calls:
                name = rank.calls[call].name
                counts[name] = counts.get(name, 0) + len(tasks)
    return sorted(counts, key=lambda name: -counts[name])


# Function: (operators before, operators after) -> ratio of their times with its lower and upper bound.
Ratio = Callable[[Sequence[AnyOperator], Sequence[AnyOperator]], tuple[float, float, float]]


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


@dataclass(frozen=True)
class MergedCalls:
    """Calls, in program order, replaced by one call ``name`` with ``work`` at the place of ``anchor``, one of them."""

    name: str
    calls: tuple[int, ...]
    anchor: int
    work: tuple[DeviceWork, ...]


def merge_calls(
    rank: RankGraph,
    merged: Iterable[MergedCalls],
    homes: Mapping[int, int],
    operators: Mapping[int, Sequence[AnyOperator]],
    ratio: Ratio,
) -> RankGraph:
    """Return ``rank`` with the ``merged`` calls. ``homes``: task -> its call; ``operators``: call -> its operators.

    If all replaced tasks were measured, the replacement takes their time multiplied by ``ratio``; otherwise it has no
    price. Host pieces of operators that launch nothing any more are removed; so are launches within operators that keep
    others, each with the piece before it.
    """
    tasks_of: dict[int, list[Task]] = {}
    for task in rank.tasks:
        if task.id in homes:
            tasks_of.setdefault(homes[task.id], []).append(task)
    calls = dict(rank.calls)
    replaced: dict[int, tuple[Task, ...]] = {}
    for group in merged:
        members = [task for call in group.calls for task in tasks_of.get(call, ())]
        place = next((task for task in tasks_of.get(group.anchor, ())), None)
        if place is None or len(members) < 2:
            continue
        number = max(calls, default=-1) + 1
        anchor = calls.get(group.anchor) or CallInfo(group.anchor, group.name)
        calls[number] = CallInfo(number, group.name, anchor.phase, group.anchor, anchor.module, line=anchor.line)
        before = [record for call in group.calls for record in operators.get(call, ())]
        durations = _durations(members, before, group.work, ratio)
        replaced |= {task.id: () for task in members}
        replaced[place.id] = tuple(
            Task(-1, piece.name, piece.kind, place.stream, piece.operators, duration, call=number)
            for piece, duration in zip(group.work, durations, strict=True)
        )
    return _Rewriter(replace(rank, calls=calls), replaced).rewrite()


def _durations(
    members: Sequence[Task], before: Sequence[AnyOperator], work: Sequence[DeviceWork], ratio: Ratio
) -> list[Duration | None]:
    known = [task.duration for task in members]
    after = [record for piece in work for record in piece.operators]
    if not before or any(duration is None for duration in known):
        return [None] * len(work)
    seconds = sum(duration.seconds for duration in known if duration is not None)
    likely, lower, upper = (seconds * each for each in ratio(before, after))
    parts = [ratio(after, piece.operators)[0] for piece in work]
    return [Duration(likely * part, lower * part, upper * part, "scaled by its operator", "fitted") for part in parts]


class _Rewriter:
    """Rewriter of a rank. ``replaced``: task -> tasks launched in its place; the host work of removed ones goes too."""

    def __init__(self, rank: RankGraph, replaced: Mapping[int, tuple[Task, ...]]) -> None:
        self._rank = rank
        self._replaced = replaced
        self._tasks: list[Task] = []
        self._places: list[tuple[int, int]] = []

    def rewrite(self) -> RankGraph:
        threads = {name: self._thread(actions) for name, actions in self._rank.threads.items()}
        # Tasks keep their order, which differs from that of the threads.
        order = sorted(range(len(self._tasks)), key=self._places.__getitem__)
        number = {before: now for now, before in enumerate(order)}
        tasks = tuple(replace(self._tasks[before], id=now) for now, before in enumerate(order))
        numbered = {
            name: tuple(
                replace(action, task=number[action.task]) if isinstance(action, Launch) else action
                for action in actions
            )
            for name, actions in threads.items()
        }
        return replace(self._rank, threads=numbered, tasks=tasks)

    def _thread(self, actions: Sequence[Action]) -> list[Action]:
        gone = self._host_work_gone(actions)
        found: list[Action] = []
        for place, action in enumerate(actions):
            if place in gone:
                continue
            if not isinstance(action, Launch):
                found.append(action)
                continue
            instead = self._replaced.get(action.task)
            if instead is None:
                found.append(self._launched(self._rank.tasks[action.task], action.duration, action.task))
                continue
            for number, task in enumerate(instead):
                if number:
                    found.append(HostWork("T5", _unit(actions, place)))
                found.append(self._launched(task, action.duration, action.task, number))
        return found

    def _launched(self, task: Task, duration: Duration | None, before: int, number: int = 0) -> Launch:
        self._tasks.append(task)
        self._places.append((before, number))
        return Launch(len(self._tasks) - 1, duration)

    def _host_work_gone(self, actions: Sequence[Action]) -> set[int]:
        """Return the places of host work that belongs to removed launches."""
        gone: set[int] = set()
        for place, action in enumerate(actions):
            if not (isinstance(action, Launch) and self._replaced.get(action.task) == ()):
                continue
            unit = _unit(actions, place)
            around = _around(actions, place, unit)
            left = [each for each in around if isinstance(actions[each], Launch) and self._stays(actions[each])]
            host = [each for each in around if isinstance(actions[each], HostWork)]
            if not left:
                gone.update(host)
                continue
            before = max((each for each in host if each < place), default=None)
            first = before is not None and actions[before].kind != "T5"  # type: ignore[union-attr]
            after = min((each for each in host if each > place), default=None)
            piece = after if first else before
            if piece is not None:
                gone.add(piece)
        return gone

    def _stays(self, action: Action) -> bool:
        assert isinstance(action, Launch)
        return self._replaced.get(action.task) != ()


def _unit(actions: Sequence[Action], place: int) -> int | None:
    """Return the operator call that makes the launch at ``place``."""
    for each in range(place - 1, -1, -1):
        action = actions[each]
        if isinstance(action, HostWork):
            return action.call
    return None


def _around(actions: Sequence[Action], place: int, unit: int | None) -> range:
    """Return the places of the actions of ``unit`` around ``place``."""
    first = last = place
    while first > 0 and not _foreign(actions[first - 1], unit):
        first -= 1
    while last + 1 < len(actions) and not _foreign(actions[last + 1], unit):
        last += 1
    return range(first, last + 1)


def _foreign(action: Action, unit: int | None) -> bool:
    return isinstance(action, HostWork) and action.call != unit


_BAGS = "embedding_bag"


def fusible_chains(rank: TracedRank, pattern: str) -> list[MergedCalls]:
    """Return chains of at least two calls matching ``pattern``, as ``torch.compile`` would fuse them.

    The fused kernel (:func:`e2e.lowering.torch_compile.fused_chains`) reads each input from outside the chain once and
    writes each output used outside once.
    """
    found = []
    for chain in fused_chains(rank.lowered, rank.trace, rank.single(rank.matching(pattern))):
        name = "what-if::" + chain.name.rpartition("::")[2].removeprefix("triton_")
        work = (DeviceWork(name, (chain.work,)),)
        found.append(MergedCalls(name, chain.calls, chain.calls[-1], work))
    return found


def batched_lookups(rank: TracedRank) -> list[MergedCalls]:
    """Group at least two ``embedding_bag`` lookups with equal bags, width and number type into batched lookups.

    They are computed as by FBGEMM's table-batched operator. Their gradients stay dense; a batched backward pass has the
    launches of FBGEMM's.
    """
    families: dict[object, list[int]] = {}
    for call, tasks in rank.work.items():
        if call not in rank.calls or _BAGS not in rank.calls[call].name or not rank.single((call,)):
            continue
        lookup = _lookup(rank, call)
        if lookup is not None and lookup.tables == 1 and not lookup.mixed and lookup.mode == "sum":
            key = (lookup.direction, lookup.dim, lookup.bags, lookup.dtype, rank.calls[call].name, len(tasks))
            families.setdefault(key, []).append(call)
    return [merged for calls in families.values() for merged in _in_order(rank, calls)]


def _lookup(rank: TracedRank, call: int) -> EmbeddingLookup | None:
    records = [record for task in rank.work[call] for record in task.operators]
    return next((record for record in records if isinstance(record, EmbeddingLookup)), None)


def _in_order(rank: TracedRank, calls: Sequence[int]) -> list[MergedCalls]:
    """Merge the calls into one at a place that keeps data dependencies.

    At the first one if all their inputs are ready there, else at the last one if no result is used before, else only
    those before the first use.
    """
    if len(calls) < 2:
        return []
    places = {call: place for place, call in enumerate(rank.work)}
    between = [each for each in rank.work if places[calls[0]] < places[each] < places[calls[-1]] and each not in calls]
    made = {storage for each in between for storage in rank.writes(each)}
    if not made & {storage for call in calls for storage in rank.reads(call)}:
        return [_merged(rank, calls, calls[0])]
    results: set[int] = set()
    taken: list[int] = []
    rest = list(calls)
    for each in sorted((*between, *calls), key=places.__getitem__):
        if each in calls:
            taken.append(each)
            results |= rank.writes(each)
            rest.remove(each)
        elif results & rank.reads(each):
            break
    found = [_merged(rank, taken, taken[-1])] if len(taken) > 1 else []
    return found + _in_order(rank, rest)


def _merged(rank: TracedRank, calls: Sequence[int], anchor: int) -> MergedCalls:
    lookups = [lookup for call in calls if (lookup := _lookup(rank, call)) is not None]
    first, count = lookups[0], len(lookups)
    if len(set(lookups)) == 1:
        record = replace(first, tables=count, kernel="table_batched")
    else:
        tables = [TableLookup(each.rows, each.dim, each.indices, each.bags, each.dtype) for each in lookups]
        record = EmbeddingLookup.of(tables, first.direction)
    if first.direction == "forward":
        name = f"what-if::{count} batched lookups"
        return MergedCalls(name, tuple(calls), anchor, (DeviceWork(name, (record,)),))
    name = f"what-if::{count} batched lookups backward"
    values = sum(each.rows * each.dim for each in lookups)
    device = next(each.device for each in _tensors(rank, anchor))
    indices = Tensor(-1, -1, (sum(each.indices for each in lookups),), "int64", device)
    cleared = replace(fill(Tensor(-1, -1, (values,), first.dtype, device), "aten::zeros"), auxiliary=False)
    call = replace(rank.calls[anchor], name=name)
    return MergedCalls(name, tuple(calls), anchor, (cleared, *update_work(call, Context(), record, indices, values)))


def _tensors(rank: TracedRank, call: int) -> list[Tensor]:
    return [each for each in rank.calls[call].inputs if isinstance(each, Tensor) and each.device != "cpu"]
