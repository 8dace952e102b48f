"""Python objects sent between ranks, as pipeline stages do to agree on shapes.

A :class:`Mailbox` outlives the capture of one rank: a rank that requests an object not sent yet stops with
:class:`NotYetSent` and is captured again, from its beginning, when its peer has sent it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from e2e.capture.script_errors import NotYetSent


@dataclass
class Mailbox:
    """Objects in transit: (source, target) -> all objects sent, in order."""

    sent: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    _posted: dict[tuple[int, int], int] = field(default_factory=dict)
    _taken: dict[tuple[int, int], int] = field(default_factory=dict)

    def begin(self, rank: int) -> None:
        """Restart ``rank`` from its beginning: it sends and receives the same objects again."""
        for counts in (self._posted, self._taken):
            for pair in [pair for pair in counts if rank == pair[0 if counts is self._posted else 1]]:
                del counts[pair]

    def post(self, source: int, target: int, objects: list[Any]) -> None:
        """Store the objects, unless they were sent in an earlier attempt."""
        place = self._posted[source, target] = self._posted.get((source, target), 0) + 1
        box = self.sent.setdefault((source, target), [])
        if place > len(box):
            box.append(objects)

    def ready(self, rank: int, wanted: NotYetSent) -> bool:
        """True if the object that ``rank`` waited for has been sent."""
        return len(self.sent.get((wanted.source, rank), [])) > wanted.place

    def take(self, source: int, target: int) -> list[Any]:
        """Return the next objects; raise :class:`NotYetSent` if they have not been sent."""
        place = self._taken.get((source, target), 0)
        box = self.sent.get((source, target), [])
        if place >= len(box):
            raise NotYetSent(source, place)
        self._taken[source, target] = place + 1
        return box[place]
