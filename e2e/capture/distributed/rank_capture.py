"""Capture of one rank of the user's distributed script: a steady step, recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from e2e.capture.distributed.communication import Communication
from e2e.capture.distributed.mailbox import Mailbox
from e2e.capture.distributed.parallel_libraries import LibraryPatches
from e2e.capture.distributed.world import RankPlace, fake_world
from e2e.capture.recorder import Recorder
from e2e.capture.script import make_workload, own_process, reporting
from e2e.capture.script_reference import StepFunction, script_folder, script_name
from e2e.capture.session import CapturedWorkload, is_compiled, module_paths, recording
from e2e.capture.tf32_switches import tf32_switches
from e2e.step.operator_trace import OperatorTrace
from e2e.step.options import NO_TF32, StepOptions, Tf32Switches

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
            recorder.enabled = True
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
    recorder.bucket_mb = script.options.bucket_mb
    before = set(sys.modules)
    with ExitStack() as stack:
        stack.callback(lambda: _forget(set(sys.modules) - before, script.script))
        stack.enter_context(own_process())
        stack.enter_context(recording(recorder, script.options))
        stack.enter_context(fake_world(place, recorder, mailbox))

        libraries = LibraryPatches(recorder, stack)

        def make() -> CapturedWorkload:
            workload = make_workload(script.script, script.parameters, libraries.update)
            libraries.update()  # for imports of the function itself
            return workload

        yield recorder, make


def _forget(names: set[str], script: StepFunction) -> None:
    """Forget modules next to the script, to be imported again on the next rank, as in its own process."""
    folder = script_folder(script)
    if folder is None:
        return
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and folder in Path(file).resolve().parents and "site-packages" not in file:
            del sys.modules[name]


def _signature(module: torch.nn.Module) -> RankSignature:
    """Return the parameters and buffers of a module; parts of one sharded tensor count as equal, since rank 0 has the
    largest.
    """
    held = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return tuple(
        (name, tuple(tensor.shape), str(tensor.dtype), str(getattr(tensor, "placements", ""))) for name, tensor in held
    )
