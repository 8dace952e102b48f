"""Maps tasks of a graph, predicted or recorded, to their operators, and those to tensors and names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from e2e.lowering.lower_trace import lower
from e2e.price.recorded_kernels import described_call
from e2e.step.collective_names import kind_of
from e2e.step.execution_graph import RankGraph, Task
from e2e.step.operator_trace import OperatorCall, OperatorTrace, tensors
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


def names_in(ranks: Collection[TracedRank]) -> list[str]:
    """Names of the operators that launch something, the most frequent first."""
    counts: dict[str, int] = {}
    for rank in ranks:
        for call, tasks in rank.work.items():
            if call in rank.calls:
                name = rank.calls[call].name
                counts[name] = counts.get(name, 0) + len(tasks)
    return sorted(counts, key=lambda name: -counts[name])
