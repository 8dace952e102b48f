"""Capture of the user's own distributed step for any number of GPUs, without a GPU: :func:`capture_distributed`.

Selection of captured ranks
---------------------------

Ranks that run the same program are captured once; ``multiplicity`` of the graph gives the number that each represents.

1. Rank 0 is captured, and every rank that a captured one sends to or receives from: one per pipeline stage.
2. Ranks that meet only in collectives count as identical: data-parallel, FSDP and tensor-parallel ranks are one each.
Of
   a tensor that does not divide evenly rank 0 holds the largest part, so it represents the slowest.
3. This is checked: the last rank of the job is constructed (not run), and its parameters and buffers are compared with
   those of the captured ranks by name, shape, dtype and placement. If they differ (tables of embeddings spread over the
   ranks), all ranks of the smallest process group whose last rank differs are captured.
4. ``ranks`` names the ranks to capture instead, for example if the code branches by rank without a difference in the
   parameters; their partners in point-to-point calls are captured too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodel.base.errors import InputError, ModelError
from costmodel.base.say import Say
from e2e.capture.distributed.mailbox import Mailbox
from e2e.capture.distributed.rank_capture import CapturedRank, RankScript, RankSignature, capture_rank, rank_signature
from e2e.capture.distributed.world import RankPlace
from e2e.capture.script_errors import NotYetSent
from e2e.capture.script_reference import StepFunction, script_name
from e2e.capture.session import CapturedWorkload
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import NO_TF32, StepOptions, Tf32Switches

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
    :class:`e2e.capture.distributed.rank_capture.RankScript`.

    Raise ``InputError`` for impossible numbers. A script that fails prints its own traceback on standard error and
    raises ``ModelError``, as does one that waits for an object that no rank sends.
    """
    program = RankScript(script, dict(parameters or {}), options or StepOptions(), accept)
    job = _Job(program, gpus, gpus_per_node, progress)
    job.check(ranks)
    if ranks:
        job.capture(ranks)
    else:
        job.capture([0])
        job.capture(job.unlike())
    order = sorted(job.captured)
    traces = tuple(job.captured[rank].trace for rank in order)
    first = job.captured[order[0]]
    source = f"{script_name(script)} on {gpus} GPUs"
    sizes = first.samples, first.sequence_length
    return DistributedCapture(traces, _multiplicity(order, gpus), source, *sizes, switches=first.switches)


@dataclass
class _Job:
    script: RankScript
    gpus: int
    gpus_per_node: int
    progress: Say | None
    mailbox: Mailbox = field(default_factory=Mailbox)
    captured: dict[int, CapturedRank] = field(default_factory=dict)

    def check(self, ranks: Sequence[int] | None) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise InputError(f"{self.gpus} GPUs, {self.gpus_per_node} per node: give at least one of each")
        for rank in ranks or ():
            if not 0 <= rank < self.gpus:
                raise InputError(
                    f"rank {rank} is not one of the {self.gpus} GPUs; name ranks from 0 to {self.gpus - 1}"
                )

    def capture(self, ranks: Sequence[int]) -> None:
        """Capture ``ranks`` and their peers; a rank that waits for an object is captured again when it has been
        sent.
        """
        wanted = [rank for rank in dict.fromkeys(ranks) if rank not in self.captured]
        waiting: dict[int, NotYetSent] = {}
        while wanted:
            rank = self._next(wanted, waiting)
            found = self._attempt(rank, waiting)
            if rank in self.captured:
                wanted.remove(rank)
            wanted += [peer for peer in sorted(found) if peer not in self.captured and peer not in wanted]

    def _next(self, wanted: list[int], waiting: dict[int, NotYetSent]) -> int:
        for rank in wanted:
            if rank not in waiting or self.mailbox.ready(rank, waiting[rank]):
                return rank
        rank = wanted[0]
        raise ModelError(
            f"{self.script.reference}: rank {rank} waits for an object from rank {waiting[rank].source}, which never "
            "sends one; look for recv_object_list without its send_object_list"
        )

    def _attempt(self, rank: int, waiting: dict[int, NotYetSent]) -> set[int]:
        """Capture ``rank`` or note the object it waits for; return its peers."""
        if self.progress is not None:
            self.progress(f"capturing rank {rank} of {self.gpus}")
        try:
            self.captured[rank] = capture_rank(self.script, self._place(rank), self.mailbox)
        except NotYetSent as wait:
            waiting[rank] = wait
            return {wait.source} | {target for source, target in self.mailbox.sent if source == rank}
        return set(self.captured[rank].peers)

    def unlike(self) -> list[int]:
        """Return the ranks whose parameters differ from those captured so far (rule 3 in the module docstring)."""
        known = {each.signature for each in self.captured.values()}
        if self._signature(self.gpus - 1) in known:
            return []
        groups = {ranks for each in self.captured.values() for ranks in each.trace.process_groups.values()}
        for members in sorted(groups, key=len):
            if members[-1] not in self.captured and self._signature(members[-1]) not in known:
                if len(members) > MOST_DIFFERENT:
                    raise InputError(
                        f"{self.script.reference}: the {len(members)} ranks of a process group hold different "
                        "parameters; name those to capture (--ranks 0,1,...)"
                    )
                return list(members)
        return [self.gpus - 1]

    def _signature(self, rank: int) -> RankSignature:
        if rank in self.captured:
            return self.captured[rank].signature
        return rank_signature(self.script, self._place(rank), self.mailbox)

    def _place(self, rank: int) -> RankPlace:
        return RankPlace(rank, self.gpus, self.gpus_per_node)


def _multiplicity(ranks: Sequence[int], gpus: int) -> dict[int, int]:
    """Divide ``gpus`` evenly over the captured ranks; the first one gets the remainder."""
    share, left = divmod(gpus, len(ranks))
    return {rank: share + (left if rank == ranks[0] else 0) for rank in ranks}
