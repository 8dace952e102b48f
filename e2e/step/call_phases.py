"""Phase of the step for every operator call.

A source marks the phases that are certain: autograd's own calls are ``backward``, calls inside ``Optimizer.step`` are
``optimizer``, those of the data loader ``data``; all other calls come as ``forward``. Many of these are not part of the
forward pass: gradient clipping and a scaler's check for infinities lie between backward pass and optimizer, averages of
weights and ``loss.item()`` after the optimizer. A call certainly belongs to the forward pass if it has the sequence
number of an autograd node that ran later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from e2e.step.operator_trace import Phase

# Phase of an undifferentiated call by the phase of the next call.
_BEFORE: Mapping[Phase, Phase] = {"backward": "forward", "optimizer": "optimizer"}


class PhasedCall(Protocol):
    """Operator call of a source, with the phase that the source marked."""

    @property
    def id(self) -> int:
        """Number of the call in its trace."""
        ...

    @property
    def phase(self) -> Phase:
        """Phase as marked by the source."""
        ...

    @property
    def sequence(self) -> int | None:
        """Sequence number shared by a forward call and its backward call, or None."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedCall:
    """Fields of a call that decide its phase. ``sequence`` links a backward call with its forward call."""

    id: int
    phase: Phase
    sequence: int | None


def settled_phases(calls: Iterable[PhasedCall]) -> Mapping[int, Phase]:
    """Return call -> phase for the ``calls`` of one step, given in the order in which they began.

    A call marked as forward that comes after a backward pass or an optimizer step and is not differentiated gets the
    phase of the following work: ``optimizer`` before an optimizer step, ``forward`` before the next pass (of another
    micro-batch or another network), ``other`` at the end of the step.
    """
    ordered = list(calls)
    passes = [place for place, call in enumerate(ordered) if call.phase in ("backward", "optimizer")]
    first = passes[0] if passes else len(ordered)
    differentiated = {call.sequence for call in ordered if call.phase == "backward"} - {None}
    found: dict[int, Phase] = {}
    following: Phase = "other"
    for place in reversed(range(len(ordered))):
        call = ordered[place]
        if call.phase != "forward":
            found[call.id] = call.phase
            following = _BEFORE.get(call.phase, following)
        elif place < first or call.sequence in differentiated:
            found[call.id] = following = "forward"
        else:
            found[call.id] = following
    return found
