"""Work of a rank's step, by which ranks of a program are told apart: what it computes and with whom it communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from e2e.capture.distributed.communication import Communication
from e2e.step.operator_trace import OperatorCall, tensors

# Share of the elements of a step by which ranks of one kind may differ: parts of parameters that do not divide evenly,
# values that one rank reads for its messages.
SLACK = 0.01
_COMMUNICATION = tuple(f"{namespace}::" for namespace in Communication.NAMESPACES)


@dataclass(frozen=True)
class RankWork:
    """Elements on the GPU that go through each operator, and the number of calls of each collective."""

    elements: Counter[str]
    collectives: Counter[str]
    # The steps of the rank differ by their data, so that the elements of one say nothing of the rank.
    drawn: bool = False

    def is_like(self, other: RankWork) -> bool:
        """True if both steps are the same up to :data:`SLACK`, or differ by their data at most."""
        if self.drawn and other.drawn:
            return self.collectives == other.collectives
        names = self.elements.keys() | other.elements.keys()
        apart = sum(abs(self.elements[name] - other.elements[name]) for name in names)
        most = max(self.elements.total(), other.elements.total())
        return self.collectives == other.collectives and apart <= SLACK * most


def work_of(calls: Iterable[OperatorCall]) -> RankWork:
    """Return the work of a step."""
    elements: Counter[str] = Counter()
    collectives: Counter[str] = Counter()
    for call in calls:
        if call.name.startswith(_COMMUNICATION):
            collectives[call.name] += 1
        held = [each for each in tensors((*call.inputs, *call.outputs)) if each.device != "cpu"]
        elements[call.name] += sum(prod(each.shape) for each in held)
    return RankWork(elements, collectives)
