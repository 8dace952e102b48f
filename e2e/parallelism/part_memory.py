"""Allocations and frees of the passes of a model's parts, for replaying a stage's memory.

Each part is self-contained: a storage that is made by another part and freed by this one (the activations between two
layers, or their gradient) counts as allocated at the beginning of this part, and in the part that makes it until that
part ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from e2e.step.memory import Lifetime, lifetimes, role_of, whole_blocks
from e2e.step.operator_trace import OperatorTrace, tensors

# Cast of a weight with both copies, which Transformer Engine keeps for the micro-batches of a step.
_CAST = "float8::cast_both"
_GATHER = "parallel::all_gather"
# Name of a part; with the number of the pass, and True for backward.
PartName = str | int
PartKey = tuple[int, bool, PartName]


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """Allocation of ``storage`` with ``size`` bytes, or its free if ``size`` is 0."""

    storage: int
    size: int
    # True if it is the gradient of a parameter, which no event frees.
    gradient: bool = False
    # Number of experts in the gradient.
    alike: int = 1
    # True if it is a weight in 8 bits, the same in every pass of a step.
    cast_weight: bool = False


@dataclass(frozen=True)
class PartMemory:
    """Allocations and frees of one part."""

    # Events of the forward and backward pass, in order.
    forward: tuple[MemoryEvent, ...] = ()
    backward: tuple[MemoryEvent, ...] = ()
    # Storages kept for the backward pass that are the input of the part.
    given: frozenset[int] = frozenset()
    # Storages that selective recomputation makes again.
    core: frozenset[int] = frozenset()
    # Storages that recomputation by operators keeps.
    chosen: frozenset[int] = frozenset()

    @property
    def left(self) -> dict[int, int]:
        """Storages that outlive the forward pass, with their sizes, in the order of their allocation."""
        alive: dict[int, int] = {}
        for event in self.forward:
            if event.size:
                alive[event.storage] = event.size
            else:
                alive.pop(event.storage, None)
        return alive

    def kept(self, recompute: str) -> frozenset[int]:
        """Return the storages kept for the backward pass with ``recompute=``; a recomputed layer needs its input even
        if the backward pass does not read it.
        """
        if recompute == "full":
            return self.given
        if recompute == "operators":
            return self.given | self.chosen
        left = frozenset(self.left)
        return left - self.core if recompute == "selective" else left

    def coarse(self) -> PartMemory:
        """Return the events with all temporary storages of a pass merged into one of their peak size, freed in the
        backward pass after the gradients are allocated.
        """
        cast = tuple(event for event in self.forward if event.cast_weight and event.size)
        if cast:
            others = [
                tuple(event for event in events if not event.cast_weight) for events in (self.forward, self.backward)
            ]
            plain = PartMemory(others[0], others[1], self.given, self.core, self.chosen).coarse()
            gone = tuple(replace(event, size=0) for event in cast)
            return replace(plain, forward=(*cast, *plain.forward), backward=(*plain.backward, *gone))
        left = self.left
        passing = {
            event.storage: event.size
            for event in self.forward
            if event.size and event.storage in self.chosen - set(left)
        }
        forward = [MemoryEvent(storage, size) for storage, size in (left | passing).items()]
        working = [MemoryEvent(-1, size) for size in (_most(self.forward, left | passing),) if size]
        gradients = [event for event in self.backward if event.gradient]
        most = [MemoryEvent(-1, size) for size in (self._most_in_backward(left),) if size]
        freed = [MemoryEvent(storage, 0) for storage in (-1, *left)]
        return PartMemory(
            (*forward, *working, *(MemoryEvent(storage, 0) for storage in (-1, *passing))),
            (*most, *gradients, *freed),
            self.given,
            self.core,
            self.chosen,
        )

    def _most_in_backward(self, left: Mapping[int, int]) -> int:
        """Return the peak bytes of the backward pass beyond the storages kept by the forward pass, without
        gradients.
        """
        level, most = sum(left.values()), 0
        sizes = dict(left)
        for event in self.backward:
            if event.gradient:
                continue
            if event.size:
                sizes[event.storage] = event.size
            level += event.size or -sizes.pop(event.storage, 0)
            most = max(most, level)
        return most - sum(left.values())


def _most(events: tuple[MemoryEvent, ...], besides: Mapping[int, int]) -> int:
    """Return the peak bytes of storages not in ``besides``."""
    level = most = 0
    sizes: dict[int, int] = {}
    for event in events:
        if event.storage in besides:
            continue
        if event.size:
            sizes[event.storage] = event.size
        level += event.size or -sizes.pop(event.storage, 0)
        most = max(most, level)
    return most


def memory_of_parts(
    trace: OperatorTrace,
    parts: Mapping[int, PartKey],
    core: Collection[int] = (),
    chosen: Collection[int] = (),
    never_made: Collection[int] = (),
) -> dict[PartName, PartMemory]:
    """Return part -> its memory in the first two passes of ``trace``.

    ``parts``: call -> its part. ``core``, ``chosen``: forward calls, with their nested calls, that selective
    recomputation repeats, and whose outputs recomputation by operators keeps. ``never_made``: storages that compiled
    code keeps in registers or recomputes.
    """
    found = lifetimes(trace)
    writer = _PartWriter(trace, parts, _cast_weights(trace, found), _own_shares(trace))
    for storage, life in found.items():
        if not life.existed and life.size and storage not in never_made:
            writer.add(storage, life)
    made: dict[int, set[int]] = {}
    for storage, place in writer.made.items():
        made.setdefault(place, set()).add(storage)

    def of(calls: Collection[int]) -> frozenset[int]:
        wanted = set(calls)
        places = (place for place, call in enumerate(trace.calls) if call.id in wanted)
        return frozenset(storage for place in places for storage in made.get(place, ()))

    return writer.parts(of(core), of(chosen))


def _cast_weights(trace: OperatorTrace, found: Mapping[int, Lifetime]) -> frozenset[int]:
    """Return the storages of 8-bit weights that the backward pass reads, and of other copies by the same casts.

    Empty for recipes that cast in every pass and keep only the weights.
    """
    cast: set[int] = set()
    for call in trace.calls:
        if call.name == _CAST and call.phase == "forward":
            given = next(tensors(call.inputs), None)
            life = None if given is None else found.get(given.storage)
            if life is not None and life.existed and role_of(life) == "parameters":
                cast.update(tensor.storage for tensor in tensors(call.outputs))
    return frozenset(cast)


def _own_shares(trace: OperatorTrace) -> dict[int, float]:
    """Return storage -> fraction kept for the backward pass, for casts of data gathered from other ranks.

    Transformer Engine keeps the rank's own part in 8 bits and gathers it again (``_LayerNormLinear`` of its
    module/layernorm_linear.py), as sequence-parallel layers of 16 bits do.
    """
    gathered: dict[int, float] = {}
    found: dict[int, float] = {}
    for call in trace.calls:
        if call.name == _GATHER:
            part, whole = next(tensors(call.inputs), None), next(tensors(call.outputs), None)
            if part is not None and whole is not None and 0 not in whole.shape:
                sizes: list[int] = [prod(tensor.shape) for tensor in (part, whole)]
                gathered[whole.storage] = sizes[0] / sizes[1]
        elif call.name == _CAST:
            given = next(tensors(call.inputs), None)
            if given is not None and given.storage in gathered:
                found.update((tensor.storage, gathered[given.storage]) for tensor in tensors(call.outputs))
    return found


@dataclass
class _PartWriter:
    """Collector of allocations and frees by part and pass, each with its index among the calls."""

    trace: OperatorTrace
    keys: Mapping[int, PartKey]
    cast_weights: frozenset[int] = frozenset()
    own_shares: Mapping[int, float] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    found: dict[tuple[bool, PartName], list[tuple[float, MemoryEvent]]] = field(default_factory=dict)
    given: dict[PartName, set[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends: dict[tuple[bool, PartName], tuple[int, int]] = {}
        self.at: list[PartKey | None] = []
        last: PartKey | None = None
        for place, call in enumerate(self.trace.calls):
            last = self.keys.get(call.id, last)
            self.at.append(last)
            if last is not None and last[0] == 0:
                begin, _ = self.ends.get(last[1:], (place, place))
                self.ends[last[1:]] = (begin, place)

    def add(self, storage: int, life: Lifetime) -> None:
        """Add a storage made in the first two passes."""
        owner, end = self.at[life.first], self.at[min(life.last, len(self.at) - 1)]
        if owner is None or owner[0] != 0:
            return
        home = owner[1:]
        self.made[storage] = life.first
        if life.gradient:
            self._event(home, life.first, MemoryEvent(storage, life.size, True, life.alike))
            return
        cast = storage in self.cast_weights
        size = life.size
        if storage in self.own_shares and end is not None and end[1] and not home[0]:
            size = whole_blocks(int(size * self.own_shares[storage]))
        self._event(home, life.first, MemoryEvent(storage, size, cast_weight=cast))
        last = life.last
        other = end[1:] if end is not None and end[0] == 0 else home
        if other not in (home, (True, home[1])):
            # Another part may have freed a storage without using it, when a Python name was rebound there.
            user = self.at[life.used]
            last, other = life.used, user[1:] if user is not None and user[0] == 0 else home
        if other == home:
            self._event(home, min(last, self.ends[home][1]) + 0.5, MemoryEvent(storage, 0, cast_weight=cast))
        elif not home[0] and other == (True, home[1]):  # its own backward pass
            self._event(other, last + 0.5, MemoryEvent(storage, 0, cast_weight=cast))
        else:
            self._hand_on(storage, life.size, last, home, other)

    def _hand_on(
        self, storage: int, size: int, last: int, home: tuple[bool, PartName], other: tuple[bool, PartName]
    ) -> None:
        """Split a storage that another part frees: it is an input of that part from the part's first pass on."""
        self._event(home, self.ends[home][1] + 0.5, MemoryEvent(storage, 0))
        name = other[1]
        entry = (False, name) if not home[0] and (False, name) in self.ends else other
        given = -1 - storage  # a separate number, since the part that makes it has its own
        self._event(entry, self.ends[entry][0] - 0.5, MemoryEvent(given, size))
        self._event(other, last + 0.5, MemoryEvent(given, 0))
        if not entry[0]:
            self.given.setdefault(name, set()).add(given)

    def _event(self, home: tuple[bool, PartName], place: float, event: MemoryEvent) -> None:
        self.found.setdefault(home, []).append((place, event))

    def parts(self, core: frozenset[int], chosen: frozenset[int]) -> dict[PartName, PartMemory]:
        found: dict[PartName, PartMemory] = {}
        for name in dict.fromkeys(name for _, name in self.ends):
            forward, backward = (
                tuple(event for _, event in sorted(self.found.get((back, name), ()), key=lambda each: each[0]))
                for back in (False, True)
            )
            given = frozenset(self.given.get(name, ()))
            found[name] = PartMemory(forward, backward, given, core, chosen)
        return {name: _closed(memory) for name, memory in found.items()}


def _closed(memory: PartMemory) -> PartMemory:
    """Return ``memory`` with the marks of its own storages only."""
    own = frozenset(event.storage for event in memory.forward)
    return PartMemory(memory.forward, memory.backward, memory.given, memory.core & own, memory.chosen & own)
