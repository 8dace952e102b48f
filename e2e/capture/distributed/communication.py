"""Communication of a script whose peers do not exist: results of collectives and point-to-point calls, and records.

Calls of tensors are intercepted at PyTorch's dispatcher (``c10d::*``, ``_c10d_functional::*``), so any Python function,
wrapper or C++ code may make them. Each becomes a record with the name of its process group, the sizes in its tensors,
the stream of the call, and the number of the returned work object.

Python objects are sent between ranks in a :class:`Mailbox`, as pipeline stages do to agree on shapes. It outlives the
capture of one rank: a rank that requests an object not sent yet stops with
:class:`e2e.capture.script_errors.NotYetSent` and is captured again, from its beginning, when its peer has sent it.
What one rank gives to all of a group is kept in :mod:`e2e.capture.distributed.shared_objects`.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from costmodel.base.errors import ModelError
from e2e.capture.distributed.shared_objects import SharedObjects
from e2e.capture.environment import WAIT_EVENT
from e2e.capture.known_values import know, known
from e2e.capture.periods import period
from e2e.capture.script_errors import NotYetSent
from e2e.step.collective_names import BELOW_FUNCTIONAL, EAGER, EAGER_CALLS, WAIT_TENSOR

# Functional forms that work in place: they return their first argument.
_IN_PLACE = frozenset(("all_reduce_", "broadcast_", "all_reduce_coalesced_"))
# Between two looks whether another process has answered, or another rank has given an object.
PAUSE_SECONDS = 0.05
# Looks at which two ranks wait for each other before one goes on.
MOST_CROSSED = 40
# Functional forms that work in place on a copy, as in their C++ bodies.
_COPIES_FIRST = frozenset(("all_reduce", "broadcast", "all_reduce_coalesced"))


class RecordedWork(dist._Work):
    """Work object returned by a call: ``wait`` is recorded and returns at once."""

    def __init__(self, number: int, results: list[torch.Tensor], waited: Callable[[int], None]) -> None:
        super().__init__()
        self.number = number
        self._results = results
        self._waited = waited

    def wait(self, timeout: Any = None) -> bool:
        """Record the wait for the collective."""
        self._results = []  # references would extend the recorded lifetimes of tensors
        self._waited(self.number)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


@dataclass
class GroupNames:
    """Names of process groups, the same on all members: description and ranks, numbered if equal."""

    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def name(self, group: Any) -> str:
        """Return the name of ``group`` and note its ranks."""
        key = group.group_name
        if key not in self._names:
            ranks = tuple(dist.get_process_group_ranks(group))
            wanted = f"{group.group_desc.removesuffix('_pg') or 'group'} {_spell(ranks)}"
            name, number = wanted, 1
            while name in self.ranks:
                number += 1
                name = f"{wanted} #{number}"
            self._names[key] = name
            self.ranks[name] = ranks
        return self._names[key]


def _spell(ranks: tuple[int, ...]) -> str:
    """Format ranks as ``0-7``, ``0-56:8`` or ``0,3,4``."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 3 or any(later - earlier != step for earlier, later in zip(ranks, ranks[1:], strict=False)):
        return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]}..{ranks[-1]} ({len(ranks)})"
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step != 1 else "")


class Communication:
    """Handler of communication calls, which it reports to ``recorder`` (:class:`e2e.capture.recorder.Recorder`).

    ``peers``: ranks that this one has sent to or received from. ``backend``: backend requested by the script.
    ``settling``: steps until the script repeats itself.
    """

    NAMESPACES = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor"))

    def __init__(self, recorder: Any) -> None:
        self.groups = GroupNames()
        self.peers: set[int] = set()
        self.backend = "cuda:nccl,cpu:gloo"
        # Names of groups of the host's own backend.
        self.on_host: set[str] = set()
        self.settling = 1
        # Every how many steps the first collective of the current step runs; None if there was none yet.
        self.every: int | None = None
        self._recorder = recorder
        self._record = recorder.record_call
        # C++ calls these objects, so Python must keep them alive.
        self._works: list[RecordedWork] = []
        self._batch: int | None = None
        self._batches = 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context of point-to-point calls that run as one kernel, which makes progress on all of them at once."""
        self._batches += 1
        before, self._batch = self._batch, self._batches
        try:
            yield
        finally:
            self._batch = before

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``func``, an operator in :attr:`NAMESPACES`."""
        name = func.name().partition(".")[0]
        if name == "_dtensor::mesh_get_process_group":
            return func(*args, **kwargs)
        if name == "_c10d_functional::_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])  # without data PyTorch would make a tensor that waits for nothing
        if name == "c10d::monitored_barrier_":
            return None  # among hosts only (Gloo): Lightning's around what one rank does
        if func.namespace == "c10d":
            return self._eager(name, func, args, kwargs)
        if name == WAIT_TENSOR:
            self._record(name, (args[0],), (args[0],), {})
            return args[0]
        if name == "_dtensor::shard_dim_alltoall":
            return self._shard_to_shard(func, *args, **kwargs)
        if func.namespace == "_c10d_functional_autograd":
            return func.decompose(*args, **kwargs)
        return self._functional(name, func, args, kwargs)

    # --- eager: c10d::allreduce_ and similar ----------------------------------------------------------

    def _eager(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        tensors = [_tensors(value) for value in given.values()]
        inputs = tuple(value for value in given.values() if _tensors(value))
        group = ProcessGroup.unbox(given["process_group"])
        written = tensors[0] if name != EAGER_CALLS["send"] else []
        work = self._work(written)
        if name == EAGER_CALLS["all_to_all"]:
            _exchange_known(given["output"], given["input"])
        for places, source in zip(given.get("output_tensors", ()), given.get("input_tensors", ()), strict=False):
            if isinstance(places, (list, tuple)):
                _gather_alike(places, source)
        if any(tensor.device.type != "cpu" for found in tensors for tensor in found):
            attributes = self._attributes(group, given, func)
            self._record(name, inputs, (written,), attributes | {"work": work.number})
        elif self.backend == "nccl" and group.group_name not in self.on_host:
            raise ModelError(f"{name}: NCCL takes tensors on the GPU, this one is on the CPU; move it to cuda")
        if len(func._schema.returns) == 2:
            return args[0], work.boxed()
        return work.boxed() if func._schema.returns else None

    def barrier(self, group: Any, async_op: bool) -> RecordedWork | None:
        """Record a barrier: in NCCL an all-reduce of one element that the host waits for."""
        work = self._work([])
        if group.group_name in self.on_host:
            return work if async_op else None
        attributes = {"process_group": self.groups.name(group), "async_op": async_op, "work": work.number}
        self._record(EAGER_CALLS["barrier"], (), (), attributes | {"blocks_host": not async_op})
        return work if async_op else None

    def _work(self, results: list[torch.Tensor]) -> RecordedWork:
        work = RecordedWork(len(self._works), results, self._waited)
        self._works.append(work)
        return work

    def _waited(self, work: int) -> None:
        self._recorder.host_call(WAIT_EVENT, work=work, stream=self._recorder.streams.current)

    def _attributes(self, group: Any, given: dict[str, Any], func: Any) -> dict[str, Any]:
        found: dict[str, Any] = {"process_group": self.groups.name(group), "async_op": given.get("async_op", True)}
        if self.every is None and len(self.groups.ranks[found["process_group"]]) > 1:
            self.every = period(sys._getframe(1)) or 1
        for side in ("dst", "src"):
            if side in given:
                peer = self.groups.ranks[found["process_group"]][given[side]]
                self.peers.add(peer)
                found |= {"peer": peer, "async_op": True, "tag": given.get("tag", 0)}
                if self._batch is not None:
                    found["batch"] = self._batch
        if func.name().startswith(f"{EAGER}recv_any_source"):
            raise ModelError("a receive from any source cannot be matched with its send; name the source rank")
        return found | _splits(given)

    # --- functional: results are new tensors -----------------------------------------------------------

    def _functional(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a functional collective as its C++ body does: copy if the eager call works in place, allocate, call,
        return at once.
        """
        short = name.partition("::")[2]
        if short not in BELOW_FUNCTIONAL:
            raise ModelError(f"{name} is not captured yet; use the functions of torch.distributed instead")
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        group = torch._C._distributed_c10d._resolve_process_group(given["group_name"])
        source = args[0]
        inputs: tuple[Any, ...]
        if short in _COPIES_FIRST:
            with self._recorder:
                result = [tensor.clone() for tensor in source] if isinstance(source, (list, tuple)) else source.clone()
            inputs = (result,)
        elif short in _IN_PLACE:
            result, inputs = source, (source,)
        else:
            result = func(*args, **kwargs)
            self._recorder.allocated(_tensors(result))
            inputs = (result, source)
            if short == "all_to_all_single":
                _exchange_known(result, source)
        attributes: dict[str, Any] = {"process_group": self.groups.name(group), "async_op": True}
        attributes |= _splits(given)
        self._record(f"{EAGER}{BELOW_FUNCTIONAL[short]}", inputs, (result,), attributes)
        return result

    def _shard_to_shard(
        self, func: Any, tensor: torch.Tensor, gather_dim: int, shard_dim: int, group_name: str
    ) -> torch.Tensor:
        """Run the operator as its CUDA body does: concatenate the pieces, exchange them, and reorder them."""
        group = torch._C._distributed_c10d._resolve_process_group(group_name)
        size = group.size()
        with self._recorder:
            pieces = torch.cat([piece.contiguous() for piece in tensor.chunk(size, shard_dim)])
        received = torch.empty_like(pieces)
        self._recorder.allocated([received])
        attributes = {"process_group": self.groups.name(group), "async_op": False}
        self._record(EAGER_CALLS["all_to_all"], (received, pieces), (received,), attributes)
        with self._recorder:
            return torch.cat(received.chunk(size), dim=gather_dim)


def _exchange_known(output: torch.Tensor, source: torch.Tensor) -> None:
    """Note what a rank receives of known numbers, such as tokens for each expert: what it sends, as if the others did
    the same.
    """
    values = known(source)
    if values is not None and output.shape == source.shape:
        know(output, values)


def _gather_alike(places: Sequence[torch.Tensor], source: torch.Tensor) -> None:
    """Give each of ``places`` the values on the host, or known ones, that this rank sends, as if others sent the same:
    sizes of pickled objects that programs gather, and their bytes.
    """
    for place in places:
        if place.device.type == source.device.type == "cpu" and place.shape == source.shape:
            place.copy_(source)
        else:
            _exchange_known(place, source)


def _splits(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows for and from each rank of an uneven exchange; raise ``ModelError`` if they do not match their
    tensor.
    """
    found: dict[str, Any] = {}
    for splits, tensor in (("output_split_sizes", given.get("output")), ("input_split_sizes", given.get("input"))):
        if given.get(splits):
            found[splits] = tuple(given[splits])
            rows = sum(found[splits])
            if isinstance(tensor, torch.Tensor) and rows != tensor.shape[0]:
                raise ModelError(
                    f"all_to_all_single: {splits} add up to {rows}, their tensor has {tensor.shape[0]} rows; where "
                    "sizes depend on data, which a capture does not have, give typical ones (such as even ones)"
                )
    return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@dataclass
class Mailbox:
    """Objects in transit: (source, target) -> all objects sent, in order; and those that are for all of a group."""

    sent: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    shared: SharedObjects | None = None
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

    def merge(self, source: int, other: Mailbox) -> None:
        """Add what ``source`` has sent in ``other``, a copy that its process was given."""
        for pair, box in other.sent.items():
            if pair[0] == source and len(box) > len(self.sent.get(pair, ())):
                self.sent[pair] = box

    def ready(self, rank: int, wanted: NotYetSent) -> bool:
        """True if the object that ``rank`` waited for has been sent, or never will be given to its group."""
        if wanted.name is not None:
            assert self.shared is not None
            return self.shared.found(wanted.name) or self.shared.has_ended(wanted.source)
        return len(self.sent.get((wanted.source, rank), [])) > wanted.place

    def take(self, source: int, target: int) -> list[Any]:
        """Return the next objects; raise :class:`NotYetSent` if they have not been sent."""
        place = self._taken.get((source, target), 0)
        box = self.sent.get((source, target), [])
        if place >= len(box):
            raise NotYetSent(source, place)
        self._taken[source, target] = place + 1
        return box[place]

    def give(self, name: str, objects: list[Any]) -> None:
        """Store the objects for all of a group."""
        if self.shared is not None:
            self.shared.give(name, objects)

    def given(self, source: int, target: int, name: str, needed: bool) -> list[Any] | None:
        """Return the objects that ``source`` gives to the group of ``target`` as ``name``, when it has; None if it does
        not come to it, or is not run: rank 0 always is, others if the objects are ``needed``.
        """
        while self.shared is not None:
            runs = self.shared.runs(source)
            if self.shared.found(name) or (runs and self._comes(source, target, name)):
                return self.shared.take(name)
            if self.shared.runs(source) or self.shared.has_ended(source) or not (needed or source == 0):
                return self.shared.take(name) if self.shared.found(name) else None
            if not runs:
                self._await(NotYetSent(source, 0, name))
        return None

    def meet(self, rank: int, others: Iterable[int], name: str) -> None:
        """Wait at a barrier for ``others`` that run at the same time: files of one may be read by another behind it."""
        if self.shared is None:
            return
        self.shared.give(f"{name} by {rank}", [])
        for other in others:
            if other != rank and self.shared.runs(other):
                self._comes(other, rank, f"{name} by {other}")

    def _comes(self, other: int, rank: int, name: str) -> bool:
        """Wait until ``other`` has given ``name``; False if it does not run any more, or waits for ``rank`` in turn."""
        assert self.shared is not None
        crossed = 0
        with self.shared.waiting(rank, other):
            while not self.shared.found(name) and crossed < MOST_CROSSED:
                if not self.shared.runs(other):
                    return self.shared.found(name)
                crossed = crossed + 1 if self.shared.waits(other, rank) else 0
                self._pause()
        return self.shared.found(name)

    def _pause(self) -> None:
        """Wait for a rank that runs at the same time."""
        time.sleep(PAUSE_SECONDS)

    def _await(self, missing: NotYetSent) -> None:
        """Wait for a rank that does not run."""
        raise missing


@dataclass
class Parcels(Mailbox):
    """Mailbox of a process that is one rank: objects are bytes outside it."""

    # Called when an object has not been sent; it returns with more of them.
    wait: Callable[[NotYetSent], dict[tuple[int, int], list[Any]]] | None = None
    # Called while a rank that runs at the same time may give one.
    pause: Callable[[], None] | None = None

    def post(self, source: int, target: int, objects: list[Any]) -> None:
        """Store the objects, unless they were sent in an earlier attempt."""
        super().post(source, target, [pickle.dumps(objects)])

    def take(self, source: int, target: int) -> list[Any]:
        """Return the next objects, when they have been sent."""
        while True:
            try:
                return list(pickle.loads(super().take(source, target)[0]))
            except NotYetSent as missing:
                self._await(missing)

    def _await(self, missing: NotYetSent) -> None:
        if self.wait is None:
            raise missing
        for pair, box in self.wait(missing).items():
            if len(box) > len(self.sent.get(pair, ())):
                self.sent[pair] = box

    def _pause(self) -> None:
        if self.pause is not None:
            self.pause()
        super()._pause()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_posted": {}, "_taken": {}, "wait": None, "pause": None}
