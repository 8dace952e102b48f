"""Work of a rank's step, by which ranks of a program are told apart: what it computes and with whom it communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

import torch

from e2e.capture.distributed.communication import Communication
from e2e.step.operator_trace import OperatorCall, tensors

# Share of the elements of a step by which ranks of one kind may differ: parts of parameters that do not divide evenly,
# values that one rank reads for its messages.
SLACK = 0.01
_COMMUNICATION = tuple(f"{namespace}::" for namespace in Communication.NAMESPACES)


@dataclass(frozen=True)
class RankWork:
    """Elements on the GPU that go through each operator that does more than make a view, and the number of calls of
    each collective.

    A rank that finds its part in a large tensor by more slices than another one does not do more.
    """

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
        if _makes_view(call.name):
            continue
        held = [each for each in tensors((*call.inputs, *call.outputs)) if each.device != "cpu"]
        elements[call.name] += sum(prod(each.shape) for each in held)
    return RankWork(elements, collectives)


@cache
def _makes_view(name: str) -> bool:
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short, None)
    return packet is not None and any(getattr(packet, overload).is_view for overload in packet.overloads())
