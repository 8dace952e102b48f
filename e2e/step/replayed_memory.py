"""Memory of a captured step on one GPU: its allocations replayed through PyTorch's allocator, step after step.

A capture records for every storage the call that makes it and the call before which it is freed. Weights and inputs
exist before the first step; the optimizer's state is allocated where its first step begins, in memory left by
activations, and stays; gradients stay until ``zero_grad`` of the next step (at the place recorded by the capture, or at
the beginning of the step if nobody calls it), or throughout if ``zero_grad`` only fills them with zeros. Every thread
and stream with matrix products has a cuBLAS workspace. Steps are replayed until the allocator reserves no more memory.

Not counted: the CUDA context and loaded kernels (0.3 to 1.5 GB of the ``nvidia-smi`` figure), workspaces of cuDNN's
convolutions, scratch memory inside single operators.
"""

from __future__ import annotations

from collections.abc import Iterator

from e2e.step.allocation_replay import AllocationReplay
from e2e.step.memory import Lifetime, MemoryUsage, lifetimes, role_of
from e2e.step.operator_trace import OperatorTrace, tensors

# The first step begins without optimizer state, the second with it; after a third all blocks exist.
_STEPS = 4
# Operators computed by cuBLAS.
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "_addmm_activation", "addmv")
)


def tells_frees(trace: OperatorTrace) -> bool:
    """True if ``trace`` records when memory is freed, as captures do and recordings do not."""
    return any("freed" in call.attributes for call in trace.calls)


def replayed_memory(trace: OperatorTrace, workspace: int) -> MemoryUsage:
    """Return the peak of steady steps of the captured ``trace``, with the memory reserved by the allocator.

    ``workspace``: bytes of one cuBLAS workspace (:func:`e2e.step.allocation_replay.workspace_bytes`).
    """
    return _CapturedReplay(trace, workspace).run()


class _CapturedReplay:
    def __init__(self, trace: OperatorTrace, workspace: int) -> None:
        self.trace = trace
        self.workspace = workspace
        self.replay = AllocationReplay()
        self.storages = lifetimes(trace)
        end = len(trace.calls) - 1
        self.made: dict[int, list[int]] = {}
        self.freed: dict[int, list[int]] = {}
        self.left: list[int] = []  # alive at the end of a step; freed at the beginning of the next one
        self.gradients: list[int] = []  # alive at the end of a step; freed by the next call of zero_grad
        for storage, life in self.storages.items():
            if life.existed or not life.size:
                continue
            self.made.setdefault(life.first, []).append(storage)
            if life.last < end:
                self.freed.setdefault(life.last + 1, []).append(storage)
            else:
                (self.gradients if life.gradient else self.left).append(storage)
        self.cleared_at = self._cleared_at()
        self.streams = self._streams()
        self.users = self._users()
        self.update = next((place for place, call in enumerate(trace.calls) if call.phase == "optimizer"), None)
        places = {*self.made, *self.freed, *self.users, self.cleared_at, self.update}
        self.places = sorted(place for place in places if place is not None)

    def run(self) -> MemoryUsage:
        for storage, life in self._existing():
            if role_of(life) != "optimizer_state":
                self.replay.take(storage, life.size, role_of(life))
        before = -1
        for _ in range(_STEPS):
            self._step()
            if self.replay.allocator.most_reserved == before:
                break
            before = self.replay.allocator.most_reserved
        return self.replay.usage()

    def _step(self) -> None:
        self.replay.course.clear()  # only the course of the last step is kept
        for storage in self.left:
            self.replay.drop(storage)
        for place in self.places:
            call = self.trace.calls[place]
            self.replay.moment = (call.id, call.name)
            if place == self.cleared_at:
                for storage in self.gradients:
                    self.replay.drop(storage)
            for storage in self.freed.get(place, ()):
                self.replay.drop(storage)
            if place == self.update:  # existing state stays
                for storage, life in self._existing():
                    self.replay.take(storage, life.size, role_of(life))
            for storage in self.made.get(place, ()):
                life = self.storages[storage]
                self.replay.take(storage, life.size, role_of(life), self.streams.get(storage, 0))
            user = self.users.get(place)
            if user is not None:
                self.replay.take(("workspace", user), self.workspace, "buffers", user[1])
            self.replay.note()

    def _cleared_at(self) -> int | None:
        """Index of the call before which the gradients of the previous step are freed; None if they stay.

        A step may clear some gradients in its middle: gradients alive at its end are cleared after it, or by the first
        clearing call of the next step.
        """
        told = [(place, call.attributes.get("gradients")) for place, call in enumerate(self.trace.calls)]
        cleared = [place for place, what in told if what == "cleared"]
        if any(what == "cleared behind" for _, what in told):
            return 0
        if cleared:
            return cleared[0]
        return None if any(what is not None for _, what in told) else 0

    def _existing(self) -> Iterator[tuple[int, Lifetime]]:
        return ((storage, life) for storage, life in self.storages.items() if life.existed)

    def _streams(self) -> dict[int, int]:
        """Return storage -> stream of the call that makes it, for other streams than the default one."""
        found: dict[int, int] = {}
        for place, storages in self.made.items():
            stream = self.trace.calls[place].attributes.get("stream")
            if isinstance(stream, int) and not isinstance(stream, bool):
                found.update(dict.fromkeys(storages, stream))
        return found

    def _users(self) -> dict[int, tuple[int, int]]:
        """Return index of the first product of each thread and stream -> (thread, stream). Each thread has its own
        handle.
        """
        found: dict[tuple[int, int], int] = {}
        for place, call in enumerate(self.trace.calls):
            if call.name in _PRODUCTS and any(each.device not in ("", "cpu") for each in tensors(call.inputs)):
                stream = call.attributes.get("stream")
                found.setdefault((call.thread, stream if isinstance(stream, int) else 0), place)
        return {place: user for user, place in found.items()}
