"""To which phase of a step every operator call belongs.

A source marks what it knows for certain: autograd's own calls are ``backward``, those inside ``Optimizer.step`` are
``optimizer``, the data loader's ``data``; all else comes as ``forward``. Much of that is none: clipping of gradients
and a scaler's check for infinities stand between backward pass and optimizer, averages of weights and ``loss.item()``
behind it. What certainly is forward has the sequence number of an autograd node that ran later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from e2e.step.operator_trace import Phase

# What an undifferentiated call belongs to by the phase of what comes next.
_BEFORE: Mapping[Phase, Phase] = {"backward": "forward", "optimizer": "optimizer"}


class PhasedCall(Protocol):
    """An operator call of a source, with the phase that the source marked."""

    @property
    def id(self) -> int:
        """The call's number in its trace."""
        ...

    @property
    def phase(self) -> Phase:
        """The phase as far as it is known."""
        ...

    @property
    def sequence(self) -> int | None:
        """The number that a forward call shares with its backward call; ``None`` without one."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedCall:
    """The part of a call that decides its phase. ``sequence`` links a backward call with its forward one."""

    id: int
    phase: Phase
    sequence: int | None


def settled_phases(calls: Iterable[PhasedCall]) -> Mapping[int, Phase]:
    """Call -> phase, for the ``calls`` of one step in the order in which they began.

    What a source took for forward, but comes after a backward pass or an optimizer and is not differentiated, serves
    what comes next: ``optimizer`` before an optimizer's step, ``forward`` before the next pass (of another
    micro-batch, of another network), ``other`` at the end of the step.
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
