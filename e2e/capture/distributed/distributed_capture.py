"""Capture of the user's own distributed step for any number of GPUs, without a GPU: :func:`capture_distributed`.

Each captured rank runs a steady step of the script, recorded (:func:`capture_rank`). Ranks that run the same program
are captured once; ``multiplicity`` of the graph gives the number that each represents. Captured are:

1. Rank 0, and every rank that a captured one sends to or receives from: one per pipeline stage.
2. Ranks that meet only in collectives count as identical: data-parallel, FSDP and tensor-parallel ranks are one each.
   Of a tensor that does not divide evenly rank 0 holds the largest part, so it represents the slowest.
3. This is checked: the last rank of the job is compared with the captured ones, a script by name, shape, dtype and
   placement of its parameters and buffers, a program by the work of its step
   (:mod:`e2e.capture.distributed.rank_work`). If it differs (tables of embeddings spread over the ranks, parameters
   that each rank updates for all), one rank of each kind is captured of the smallest process group whose last rank
   differs. Ranks between two of the same kind are taken to be of that kind too.
4. ``ranks`` names the ranks to capture instead, for example if the code of a script branches by rank without a
   difference in the parameters; their partners in point-to-point calls are captured too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from costmodel.base.errors import InputError, ModelError, Say
from e2e.capture.distributed.communication import Communication, Mailbox
from e2e.capture.distributed.deepspeed_package import deepspeed_package
from e2e.capture.distributed.shared_objects import SharedObjects
from e2e.capture.distributed.world import RankPlace, fake_world, patched_libraries
from e2e.capture.recorder import Recorder
from e2e.capture.script import make_workload, own_process, reporting, tf32_switches
from e2e.capture.script_errors import NotYetSent
from e2e.capture.script_lines import library_folder
from e2e.capture.session import CapturedWorkload, is_compiled, module_paths, recording
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import NO_TF32, StepFunction, StepOptions, Tf32Switches, script_folder, script_name

# Name, shape, dtype and placement of every parameter and buffer.
RankSignature = tuple[tuple[str, tuple[int, ...], str, str], ...]


@dataclass(frozen=True)
class RankScript:
    """Script of a job with its arguments and options."""

    # ``FILE.py:FUNCTION`` or a function.
    script: StepFunction
    parameters: dict[str, Any]
    options: StepOptions
    # Check of the workload before its first step, which raises if the job is not wanted.
    accept: Callable[[CapturedWorkload], None] | None = None

    @property
    def reference(self) -> str:
        """Name of the script for messages."""
        return script_name(self.script)


@dataclass(frozen=True)
class CapturedRank:
    """Captured step of one rank."""

    trace: OperatorTrace
    # Ranks that it sends to or receives from.
    peers: frozenset[int]
    # Its parameters and buffers.
    signature: RankSignature
    # Batch of the script's function, in samples of ``sequence_length`` tokens, if known.
    samples: int | None = None
    sequence_length: int | None = None
    # TF32 switches as set by the script.
    switches: Tf32Switches = NO_TF32


def capture_rank(script: RankScript, place: RankPlace, mailbox: Mailbox) -> CapturedRank:
    """Capture a steady step of ``script`` on the rank ``place``.

    The first step does the set-up of real jobs: FSDP learns its order of prefetching, pipeline stages agree on shapes,
    optimizers make their state. DDP rebuilds its buckets in the second, in the order of the first. Raise
    :class:`e2e.capture.script_errors.NotYetSent` if it needs an object from a rank that has not run so far.
    """
    with _prepared(script, place, mailbox) as (recorder, make):
        workload, communication = make(), recorder.communication
        if script.accept is not None:
            script.accept(workload)
        signature = _signature(workload.module)
        recorder.paths = module_paths(workload)
        with reporting(script.reference):
            for _ in range(communication.settling):
                workload.step()
            recorder.begin()
            workload.step()
        recorder.enabled = False
        groups = dict(communication.groups.ranks)
        trace = OperatorTrace(
            recorder.calls(),
            place.rank,
            place.world_size,
            groups,
            script.reference,
            compiled=bool(recorder.compiled) or is_compiled(workload.module),
            ranges=recorder.ranges.found(),
            passes=tuple(recorder.passes),
            storage_bytes=recorder.convert.identities.bytes(),
        )
        sizes = (workload.samples, workload.sequence_length)
        return CapturedRank(trace, frozenset(communication.peers), signature, *sizes, switches=tf32_switches())


def rank_signature(script: RankScript, place: RankPlace, mailbox: Mailbox) -> RankSignature:
    """Return the parameters and buffers of the rank ``place``, without running a step."""
    with _prepared(script, place, mailbox) as (_, make):
        return _signature(make().module)


@contextmanager
def _prepared(
    script: RankScript, place: RankPlace, mailbox: Mailbox
) -> Iterator[tuple[Recorder, Callable[[], CapturedWorkload]]]:
    """Context in which this process is the rank ``place``, without recording. Yields the recorder and a function that
    makes the workload.
    """
    recorder = Recorder({})
    recorder.enabled = False
    recorder.communication = Communication(recorder)
    recorder.bucket_mb, recorder.counting = script.options.bucket_mb, True
    before = set(sys.modules)
    with ExitStack() as stack:
        stack.callback(lambda: _forget(set(sys.modules) - before, script.script))
        stack.enter_context(own_process())
        stack.enter_context(recording(recorder, script.options))
        stack.enter_context(fake_world(place, recorder, mailbox))
        stack.enter_context(patched_libraries(recorder))
        stack.enter_context(deepspeed_package(recorder, named=False, note=lambda line: None))
        yield recorder, partial(make_workload, script.script, script.parameters)


def _forget(names: set[str], script: StepFunction) -> None:
    """Forget modules next to the script, to be imported again on the next rank, as in its own process."""
    folder = script_folder(script)
    if folder is None:
        return
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and folder in Path(file).resolve().parents and library_folder(file) is None:
            del sys.modules[name]


def _signature(module: torch.nn.Module) -> RankSignature:
    """Return the parameters and buffers of a module; parts of one sharded tensor count as equal, since rank 0 has the
    largest.
    """
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype), str(getattr(tensor, "placements", ""))) for name, tensor in held
    )


# Above this number of different programs the user must select ranks.
MOST_DIFFERENT = 64


@dataclass(frozen=True)
class DistributedCapture:
    """Captured ranks of a job."""

    # One per captured rank, in order of ranks.
    traces: tuple[OperatorTrace, ...]
    # Captured rank -> number of ranks it represents; the sum is the number of GPUs.
    multiplicity: Mapping[int, int]
    source: str
    # Batch of one rank, in samples of ``sequence_length`` tokens, if known.
    samples: int | None = None
    sequence_length: int | None = None
    # TF32 switches as set by the script.
    switches: Tf32Switches = NO_TF32


def capture_distributed(
    script: StepFunction,
    gpus: int,
    options: StepOptions | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    gpus_per_node: int = 8,
    ranks: Sequence[int] | None = None,
    progress: Say | None = None,
    accept: Callable[[CapturedWorkload], None] | None = None,
) -> DistributedCapture:
    """Capture one steady step of ``script`` (``FILE.py:FUNCTION``, or the function) on ``gpus`` GPUs, operator by
    operator.

    The function is written as for :func:`e2e.capture.script.load_script`, and as it would run under ``torchrun``: it
    may call ``torch.distributed.init_process_group("nccl")``, reads ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``, and
    uses DDP, ``fully_shard``, DTensor, ``torch.distributed.pipelining``, process groups and collectives, CUDA streams
    and events. Those of ``parameters`` (``batch_size``, per rank ...) that it takes are passed to it. ``ranks``: see
    the rules in the module docstring. ``progress``: callback for progress messages. ``accept``: see
    :class:`e2e.capture.distributed.distributed_capture.RankScript`.

    Raise ``InputError`` for impossible numbers. A script that fails prints its own traceback on standard error and
    raises ``ModelError``, as does one that waits for an object that no rank sends.
    """
    program = RankScript(script, dict(parameters or {}), options or StepOptions(), accept)
    return capture_job(_ScriptRanks(program), gpus, gpus_per_node, ranks=ranks, progress=progress)


class RankProgram(Protocol):
    """Program of a job's ranks."""

    @property
    def reference(self) -> str:
        """Name for messages."""
        ...

    @property
    def at_once(self) -> int:
        """Number of ranks that may be captured at the same time, in threads."""
        ...

    def capture(self, place: RankPlace, mailbox: Mailbox) -> CapturedRank:
        """Capture a steady step of the rank ``place``; raise ``NotYetSent`` if it waits for an object."""
        ...

    def signature(self, place: RankPlace, mailbox: Mailbox) -> RankSignature | None:
        """Return what tells ranks with different programs apart, or None if only a captured step does."""
        ...

    def close(self) -> None:
        """End what :meth:`capture` waits for in other threads, which then raises."""
        ...


def capture_job(
    program: RankProgram,
    gpus: int,
    gpus_per_node: int,
    *,
    ranks: Sequence[int] | None = None,
    progress: Say | None = None,
) -> DistributedCapture:
    """Capture one steady step of ``program`` on ``gpus`` GPUs (see the rules in the module docstring)."""
    with TemporaryDirectory(prefix="e2e-objects-") as folder:
        job = _Job(program, gpus, gpus_per_node, progress, SharedObjects(Path(folder)))
        job.check(ranks)
        kinds: dict[int, int] = {}
        if ranks:
            job.capture(ranks)
        else:
            if program.at_once > 1:
                job.run(sorted({0, gpus - 1}))
            job.capture([0])
            kinds = job.kinds()
            job.capture(list(kinds))
    order = sorted(job.captured)
    traces = tuple(job.captured[rank].trace for rank in order)
    first = job.captured[order[0]]
    source = f"{program.reference} on {gpus} GPUs" if gpus > 1 else program.reference
    sizes = first.samples, first.sequence_length
    return DistributedCapture(traces, _multiplicity(order, kinds, gpus), source, *sizes, switches=first.switches)


@dataclass(frozen=True)
class _ScriptRanks:
    script: RankScript
    at_once: int = 1

    @property
    def reference(self) -> str:
        return self.script.reference

    def capture(self, place: RankPlace, mailbox: Mailbox) -> CapturedRank:
        return capture_rank(self.script, place, mailbox)

    def signature(self, place: RankPlace, mailbox: Mailbox) -> RankSignature:
        return rank_signature(self.script, place, mailbox)

    def close(self) -> None:
        pass


@dataclass
class _Job:
    program: RankProgram
    gpus: int
    gpus_per_node: int
    progress: Say | None
    shared: SharedObjects
    mailbox: Mailbox = field(init=False)
    # Ranks that were run, and those of them that stand for the job.
    seen: dict[int, CapturedRank] = field(default_factory=dict)
    captured: dict[int, CapturedRank] = field(default_factory=dict)
    signatures: dict[int, RankSignature] = field(default_factory=dict)
    # Ranks that are run for what they give to a group.
    givers: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(shared=self.shared)

    def check(self, ranks: Sequence[int] | None) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise InputError(f"{self.gpus} GPUs, {self.gpus_per_node} per node: give at least one of each")
        for rank in ranks or ():
            if not 0 <= rank < self.gpus:
                raise InputError(
                    f"rank {rank} is not one of the {self.gpus} GPUs; name ranks from 0 to {self.gpus - 1}"
                )

    def capture(self, ranks: Sequence[int]) -> None:
        """Capture ``ranks`` and their peers, unless they have been."""
        self.captured.update((rank, self.seen[rank]) for rank in self.run(ranks))

    def run(self, ranks: Sequence[int]) -> list[int]:
        """Run ``ranks`` and their peers, unless they have been run, and return all of them; a rank that waits for an
        object is run again when it has been sent.
        """
        waiting: dict[int, NotYetSent] = {}
        all_ranks = list(dict.fromkeys(ranks))
        while True:
            for rank in all_ranks:  # which grows
                peers = self.seen[rank].peers if rank in self.seen else ()
                all_ranks += [peer for peer in sorted(peers) if peer not in all_ranks]
            wanted = [rank for rank in (*all_ranks, *sorted(self.givers - {*all_ranks})) if rank not in self.seen]
            if not wanted:
                return all_ranks
            for found in self._attempts(self._next(wanted, waiting), waiting):
                all_ranks += [peer for peer in sorted(found) if peer not in all_ranks]

    def _next(self, wanted: list[int], waiting: dict[int, NotYetSent]) -> list[int]:
        ready = [rank for rank in wanted if rank not in waiting or self.mailbox.ready(rank, waiting[rank])]
        if ready:
            return ready[: self.program.at_once]
        rank = wanted[0]
        raise ModelError(
            f"{self.program.reference}: rank {rank} waits for an object from rank {waiting[rank].source}, which never "
            "sends one; look for recv_object_list without its send_object_list, or ranks that wait for each other"
        )

    def _attempts(self, ranks: list[int], waiting: dict[int, NotYetSent]) -> list[set[int]]:
        """Run ``ranks`` at the same time, or note the objects they wait for; return the peers of each."""
        for rank in ranks:
            self.shared.begin(rank)
        if len(ranks) == 1:
            return [self._attempt(ranks[0], waiting)]
        with ThreadPoolExecutor(len(ranks)) as pool:
            try:
                return list(pool.map(lambda rank: self._attempt(rank, waiting), ranks))
            except BaseException:  # also a signal: the pool would wait for ranks that may never end
                self.program.close()
                raise

    def _attempt(self, rank: int, waiting: dict[int, NotYetSent]) -> set[int]:
        """Run ``rank`` or note the object it waits for; return its peers."""
        if self.progress is not None:
            self.progress(f"capturing rank {rank} of {self.gpus}")
        waits = False
        try:
            self.seen[rank] = self.program.capture(self._place(rank), self.mailbox)
        except NotYetSent as wait:
            waiting[rank], waits = wait, True
            targets = {target for source, target in self.mailbox.sent if source == rank}
            if wait.name is None:
                return {wait.source} | targets
            self.givers.add(wait.source)
            return targets
        finally:
            self.shared.end(rank, for_now=waits)
        return set(self.seen[rank].peers)

    def kinds(self) -> dict[int, int]:
        """Return the first rank of each kind in a process group with ranks unlike those captured so far, and how many
        of that group are of its kind (rule 3 in the module docstring).
        """
        known = {each.signature for each in self.captured.values()}
        if self._signature(self.gpus - 1) in known:
            return {}
        groups = {ranks for each in self.captured.values() for ranks in each.trace.process_groups.values()}
        for members in sorted(groups, key=len):
            if members[-1] not in self.captured and self._signature(members[-1]) not in known:
                self._compare(members)
                found: dict[RankSignature, list[int]] = {}
                for rank in members:
                    found.setdefault(self.signatures[rank], []).append(rank)
                return {alike[0]: len(alike) for alike in found.values()}
        return {self.gpus - 1: 1}

    def _compare(self, members: Sequence[int]) -> None:
        """Note the signatures of ``members``; those between two of the same kind are not looked at."""
        parts = [tuple(members)]
        while parts:
            unlike = [part for part in parts if self._signature(part[0]) != self._signature(part[-1])]
            for part in parts:
                if part not in unlike:
                    self.signatures.update(dict.fromkeys(part, self.signatures[part[0]]))
            if len(set(self.signatures.values())) > MOST_DIFFERENT:
                raise InputError(
                    f"{self.program.reference}: more than {MOST_DIFFERENT} ranks of a process group hold different "
                    "parameters; name those to capture (--ranks 0,1,...)"
                )
            middles = {part: len(part) // 2 for part in unlike if len(part) > 2}
            self._sign([part[middle] for part, middle in middles.items()])
            parts = [half for part, middle in middles.items() for half in (part[: middle + 1], part[middle:])]

    def _signature(self, rank: int) -> RankSignature:
        self._sign([rank])
        return self.signatures[rank]

    def _sign(self, ranks: Sequence[int]) -> None:
        """Note the signatures of ``ranks``."""
        for rank in ranks:
            if rank not in self.signatures and rank not in self.seen:
                try:
                    signature = self.program.signature(self._place(rank), self.mailbox)
                except NotYetSent:  # known when it has been run to its end
                    signature = None
                if signature is None:
                    self.run(ranks)
                else:
                    self.signatures[rank] = signature
            if rank not in self.signatures:
                self.signatures[rank] = self.seen[rank].signature

    def _place(self, rank: int) -> RankPlace:
        return RankPlace(rank, self.gpus, self.gpus_per_node)


def _multiplicity(ranks: Sequence[int], kinds: Mapping[int, int], gpus: int) -> dict[int, int]:
    """Divide ``gpus`` over the captured ranks, by the number of each kind if that is known, else evenly; the first one
    gets the remainder.
    """
    whole = sum(kinds.values()) if set(kinds) == set(ranks) else 0
    if whole and gpus % whole == 0:
        return {rank: kinds[rank] * (gpus // whole) for rank in ranks}
    share, left = divmod(gpus, len(ranks))
    return {rank: share + (left if rank == ranks[0] else 0) for rank in ranks}
