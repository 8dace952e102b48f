"""Named ranges of a step while it is recorded: ``record_function``, NVTX ranges.

They cost nothing here, as without a profiler: only the step itself is predicted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest.mock import patch

import torch

from e2e.step.named_ranges import NamedRange, NamedRanges, is_named_by_script


@dataclass
class ScriptRanges:
    """Ranges of one recorded step. A range is closed by the ``handle`` that opened it, whatever was opened since."""

    _entered: dict[int, NamedRange] = field(default_factory=dict)
    _open: list[tuple[object, int]] = field(default_factory=list)
    _in_backward: set[int] = field(default_factory=set)
    # Autograd's counter at each change of the innermost range, and the new innermost range.
    _counts: list[int] = field(default_factory=list)
    _since: list[int | None] = field(default_factory=list)
    _of_call: dict[int, int] = field(default_factory=dict)
    _of_forward: dict[int, int] = field(default_factory=dict)

    def enter(self, handle: object, name: str) -> None:
        """Begin a range called ``name``."""
        number = len(self._entered)
        self._entered[number] = NamedRange(number, name, self.innermost)
        self._open.append((handle, number))
        if torch._C._current_graph_task_id() != -1:
            self._in_backward.add(number)
        self._changed()

    @property
    def innermost(self) -> int | None:
        """Innermost open range, or None."""
        return self._open[-1][1] if self._open else None

    @property
    def around_backward(self) -> int | None:
        """Innermost open range entered outside the backward pass, or None."""
        return next((entry for _, entry in reversed(self._open) if entry not in self._in_backward), None)

    def place(self, call: int, entry: int | None) -> None:
        """Assign the enclosing ``call``, noted only now, to ``entry``."""
        self._of_call.pop(call, None)
        if entry is not None:
            self._of_call[call] = entry

    def leave(self, handle: object) -> None:
        """End the range entered with ``handle``, if it was entered here."""
        for place in reversed(range(len(self._open))):
            if self._open[place][0] is handle:
                del self._open[place]
                self._changed()
                return

    def leave_last(self) -> None:
        """End the innermost range without a handle, as NVTX pops them."""
        last = next((handle for handle, _ in reversed(self._open) if isinstance(handle, _Pushed)), None)
        if last is not None:
            self.leave(last)

    def note(self, call: int, node: int | None) -> None:
        """Assign the new ``call`` to the open ranges; ``node``: number of the autograd node that runs it, in a backward
        pass.
        """
        self.place(call, self.innermost)
        if node is not None:
            place = bisect_right(self._counts, node) - 1
            entry = self._since[place] if place >= 0 else None
            if entry is not None:
                self._of_forward[call] = entry

    def found(self) -> NamedRanges:
        """Return the ranges with at least one call."""
        used: dict[int, NamedRange] = {}
        for entry in {*self._of_call.values(), *self._of_forward.values()}:
            at: int | None = entry
            while at is not None and at not in used:
                used[at] = self._entered[at]
                at = used[at].parent
        return NamedRanges({number: used[number] for number in sorted(used)}, self._of_call, self._of_forward)

    def _changed(self) -> None:
        self._counts.append(torch._C._autograd._get_sequence_nr())
        self._since.append(self.innermost)


class _Pushed:
    """Handle for a range of NVTX, which has none."""


class RangeKeeper(Protocol):
    """Recorder of calls and ranges, active while ``enabled``."""

    enabled: bool
    ranges: ScriptRanges


@contextmanager
def heard(recorder: RangeKeeper) -> Iterator[None]:
    """Context in which the ``ranges`` of ``recorder`` follow the ranges that a script enters and leaves while it is
    enabled.
    """
    mark = torch.autograd.profiler.record_function
    enter, leave = mark.__enter__, mark.__exit__

    def entered(self: Any) -> Any:
        if recorder.enabled and is_named_by_script(self.name):
            recorder.ranges.enter(self, self.name)
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        recorder.ranges.leave(self)
        return leave(self, *error)

    def pushed(name: str, *rest: Any, **options: Any) -> int:
        if recorder.enabled:
            recorder.ranges.enter(_Pushed(), str(name))
        return 0

    def popped() -> int:
        if recorder.enabled:
            recorder.ranges.leave_last()
        return 0

    with ExitStack() as stack:
        stack.enter_context(patch.object(mark, "__enter__", entered))
        stack.enter_context(patch.object(mark, "__exit__", left))
        stack.enter_context(patch.object(torch.cuda.nvtx, "range_push", pushed))
        stack.enter_context(patch.object(torch.cuda.nvtx, "range_pop", popped))
        yield
