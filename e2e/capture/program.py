"""Run of the user's program as it is, in a process of its own (``python -m e2e.capture``), until it has made a
steady step.

The program runs as ``__main__`` with its own arguments, folder and environment. Tensors of the host are real; modules
are made without memory, on the meta device, which stands for the GPU. A step goes from one step of the first optimizer
to its next: a cyclic shift of the step as written, whatever the number of optimizers, of accumulated passes or of
closures. Without an optimizer it goes from one call of the outermost module to the next. A step is steady if the next
one runs the same operators on the same shapes; then the process ends, with the step as its answer.
"""

from __future__ import annotations

import os
import pickle
import resource
import runpy
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from costmodel.base.errors import InputError, ModelError
from e2e.capture.accumulated_passes import AccumulatedPasses
from e2e.capture.cuda_packages.finder import cuda_packages, missing_package
from e2e.capture.custom_operators import CustomOperators
from e2e.capture.distributed.communication import PAUSE_SECONDS, Communication, Mailbox, Parcels
from e2e.capture.distributed.deepspeed_package import deepspeed_package, names_deepspeed
from e2e.capture.distributed.distributed_capture import CapturedRank
from e2e.capture.distributed.rank_processes import spawned_ranks, started_programs
from e2e.capture.distributed.rank_work import work_of
from e2e.capture.distributed.world import RankPlace, fake_world, not_yet_started, patched_libraries
from e2e.capture.environment import DEFAULT_STREAM
from e2e.capture.evaluation import EvaluationPasses, PassGroup, named_generation
from e2e.capture.host_modules import modules_of_the_host
from e2e.capture.launcher import Launch
from e2e.capture.missing.hub import Hub
from e2e.capture.missing.loaders import LoadedBatches, Loading
from e2e.capture.missing.program_needs import needs_met, told_missing
from e2e.capture.periods import Differentiations
from e2e.capture.recorder import RecordedStep, Recorder
from e2e.capture.regions import Regions
from e2e.capture.script import tf32_switches
from e2e.capture.script_errors import MOST_CALLS, NotYetSent, OtherGpusError, reporting
from e2e.capture.session import recording
from e2e.capture.stand_ins import driver_tools, silent_loggers
from e2e.capture.written_files import MOST_WRITTEN, kept_files
from e2e.step.operator_trace import NamedRanges, OperatorCall, OperatorTrace, shape_of, tensors
from e2e.step.options import StepOptions

# Before a program is watched, which may not end this process unseen.
_end_process = os._exit
# Steps that are compared before the last one is taken although it differs from the one before.
MOST_STEPS = 8
# Steps that differ by their data are drawn until there are this many, of at most so many operators each; of larger ones
# as many as are compared. Ranks end with the same step, as nearly equal numbers of operators rarely lie on two sides.
MOST_DRAWN, MOST_DRAWN_CALLS = 24, 5_000
# Steps on another stream than the default one before one of them is taken.
MOST_WARMING = 24
# Steps that make what later ones find, such as the optimizer's state.
WARMING_STEPS = 2
# Steps of one optimizer while another one takes none, as in the training of a critic, or in which GPUs exchange
# nothing, before that is no longer awaited.
MOST_UNSTEPPED = 16
# A step with more backward passes is told if it has this many times the work of the one that is taken.
_MORE_WORK = 1.05
# Most steps of an optimizer that differ in turn, such as those with and without a penalty, and are taken as one.
MOST_IN_TURN = 4


@dataclass(frozen=True)
class ProgramJob:
    """Program to run, on one rank."""

    launch: Launch
    options: StepOptions
    place: RankPlace
    mailbox: Parcels
    # True if data that are not there are made up.
    made_up: bool = False


@dataclass(frozen=True)
class FoundStep:
    """Step of a program."""

    rank: CapturedRank
    mailbox: Mailbox
    # Description of the step, such as "step 3 of AdamW, 2,304 operators, equal to step 2".
    told: str
    # Other facts for the report, such as files that were stood in for.
    notes: tuple[str, ...] = ()
    # Passes outside of the step, which train nothing.
    evaluations: tuple[Evaluation, ...] = ()
    # It was taken of several that differ by their data.
    drawn: bool = False
    # Work of the loaders' workers, beside the last of the steps.
    loading: tuple[Loading, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """What is not in the step: forward passes that train nothing, or a step that does more now and then."""

    # First of the passes.
    trace: OperatorTrace
    passes: int
    # Description, such as "400 forward passes of GPT without gradients at train.py:212, every 2,000 steps".
    told: str
    # Steps after which the program trains with it again; 0 if it is not known, and for passes that train nothing.
    every: int = 0
    # True if it is a whole step then, with what every step has.
    whole: bool = False


@dataclass(frozen=True)
class WaitingRank:
    """Rank that waits for an object, with those that it has sent so far."""

    wait: NotYetSent
    mailbox: Mailbox


class HostTensors(TorchFunctionMode):
    """Factories of tensors run on the host, with memory, except inside the construction of a module."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None and makes_module():
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


def makes_module() -> bool:
    """True inside ``__init__`` of a module."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_code.co_argcount:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(owner, torch.nn.Module):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@dataclass
class StepFinder:
    """Finder of the step: cuts what is recorded at each boundary, and calls ``finish`` when a step is steady."""

    recorder: Recorder
    finish: Callable[[RecordedStep, str], None]
    # GPUs of the job, each with data of its own.
    gpus: int = 1
    # Optimizer whose steps are the boundaries, and its class name.
    optimizer: int | None = None
    title: str = ""
    # Optimizer -> its steps.
    steps: Counter[int] = field(default_factory=Counter)
    # Steps of the optimizer that are one step here, and those since the last boundary.
    in_turn: int = 1
    _since: int = 0
    # True if gradients were computed before a step of it.
    _differentiates: bool = False
    # The last step, those that differ from the one before them, by number, and the digests of all so far.
    step: RecordedStep = RecordedStep()
    different: dict[int, RecordedStep] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    # Periods of the work of the last step, and the last step with work of each set of periods.
    periods: frozenset[int] = frozenset()
    periodic: dict[frozenset[int], RecordedStep] = field(default_factory=dict)
    # Backward passes of each of them, and the first step with the most; None if the taken step has as much work.
    backward: list[int] = field(default_factory=list)
    richest: RecordedStep | None = None
    # Optimizers made so far: while there are any, calls of modules are no boundaries.
    optimizers: int = 0
    # The step was taken of several that differ by their data, and what there is to say of the last of them.
    drawn: bool = False
    remarks: tuple[str, ...] = ()
    # The first outermost module with parameters.
    root: int | None = None
    # Passes without gradients in the current step, and those of earlier ones that the step does not have.
    passes: EvaluationPasses = field(init=False)
    # False if the last passes of the last step were counted only.
    whole: bool = True
    # Passes of accumulated gradients in the current step.
    accumulated: AccumulatedPasses = field(init=False)
    evaluations: dict[tuple[str, str], tuple[PassGroup, tuple[OperatorCall, ...], dict[int, int]]] = field(
        default_factory=dict
    )
    _groups: Sequence[PassGroup] = ()
    # Passes of evaluations in the last step that were not run.
    _passed_over: int = 0
    differentiations: Differentiations = field(default_factory=Differentiations)
    # True after equal steps of several GPUs that do not communicate; and after one that does so now and then.
    _silent: bool = False
    _heard: bool = False
    # Batches of data loaders, and the work of their workers in the last step.
    batches: LoadedBatches = field(default_factory=LoadedBatches)
    loading: tuple[Loading, ...] = ()

    def __post_init__(self) -> None:
        self.passes = EvaluationPasses(self.recorder)
        self.accumulated = AccumulatedPasses(self.recorder)
        self.recorder.replayed_step = self._stepped

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which boundaries are noticed."""
        made = torch.optim.Optimizer.__init__

        def make(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.optimizers += 1
            made(optimizer, *args, **kwargs)

        handles = (
            register_optimizer_step_post_hook(self._stepped),
            register_module_forward_pre_hook(self._called),
        )
        try:
            making = patch.object(torch.optim.Optimizer, "__init__", make)
            with making, self.passes.watching(), self.accumulated.watching(), self.differentiations.watching():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _stepped(self, optimizer: Any, args: Any = (), kwargs: Any = None) -> None:
        if self.recorder.capturing:
            self.recorder.stepped.append(optimizer)
            self._begin_anew()
            return
        if not self._is_recording():  # no module has been called
            self.recorder.begin()
            return
        self.steps[id(optimizer)] += 1
        slower = self.optimizer is not None and self.steps[id(optimizer)] < self.steps[self.optimizer] - 1
        if self.optimizer is None or slower:  # a whole step has steps of all optimizers, such as five of one
            self.optimizer, self.title = id(optimizer), type(optimizer).__name__
            self._begin_anew()
            self.steps.clear()
        if id(optimizer) == self.optimizer:
            self._boundary()

    def _is_recording(self) -> bool:
        return self.recorder.enabled or self.recorder.leaving_out or self.recorder.passing_over

    def _begin_anew(self) -> None:
        """Forget the steps so far."""
        for kept in (self.digests, self.backward, self.different, self.periodic):
            kept.clear()

    def _called(self, module: torch.nn.Module, given: Any) -> None:
        if self.recorder.depth != 1 or torch._C._current_graph_task_id() != -1:  # inside another module
            return
        self._name(module)
        if self.recorder.capturing:
            return
        if self.root is None and next(module.parameters(), None) is not None:
            self.root = id(module)
            if self.optimizer is None:  # none has been stepped to make its state
                self.title = type(module).__name__
        if not self._is_recording():
            self.recorder.begin()
        elif not self.optimizers and id(module) == self.root:
            self._boundary()

    def _name(self, module: torch.nn.Module) -> None:
        """Name the parts of an outermost module that is called for the first time."""
        if id(module) not in self.recorder.paths:
            self.recorder.paths = {**self.recorder.paths, **{id(part): path for path, part in module.named_modules()}}

    def _boundary(self) -> None:
        passes = max(self.recorder.finished_passes, len(self.recorder.passes))
        self._since += 1
        if self._differentiates and not passes:  # a second step for the same gradients
            return
        self._differentiates |= passes > 0
        if self._since < self.in_turn:
            return
        self._since = 0
        whole = self.whole = self.accumulated.is_whole()
        repeated = self.accumulated.end_step()
        step = self.step = replace(self.recorder.cut(), repeated=repeated)
        self.loading, self.periods = self.batches.end_step(), self.differentiations.taken()
        every, self.recorder.communication.every = self.recorder.communication.every, None
        if max(self.periods, default=1) > 1:
            self.periodic[self.periods] = step
        self._passed_over, self._groups = self.passes.passed_over, self.passes.taken()
        for group in self._groups:
            run = step.calls[group.calls]
            parts = {call.id - run[0].id: region for call in run if (region := step.regions.get(call.id))}
            self.evaluations.setdefault((group.title, group.line), (group, run, parts))
        if self._silent and every is not None:  # such as an average of weights
            self._silent, self._heard = False, True
            if every > 1:
                self.periodic[self.periods | {every}] = step
            return
        more = "" if repeated is None else f"{repeated.more} more" if whole else f"cut {len(self.digests)}"
        self.digests.append(f"{digest(step.calls)} {more}")
        if passes > max(self.backward, default=0):
            self.richest = step
        self.backward.append(passes)
        last, equal = len(self.digests), self.digests[-1] in self.digests[-2:-1]
        self._silent = equal and self.gpus > 1 and every is None and not self._heard
        awaiting = self._silent or self.optimizers > max(1, len(self.steps))
        if (equal or last >= MOST_STEPS) and self._passed_over:
            self.passes.replaying = False  # the step that is taken must have run them
        elif last >= MOST_STEPS and not whole:
            self.accumulated.leaving_out = False  # as many passes as they are
        elif self.recorder.streams.current != DEFAULT_STREAM and last < MOST_WARMING:
            return  # it warms up for the capture of a CUDA graph, perhaps
        elif equal and last > (MOST_UNSTEPPED if awaiting else 2):
            if self._silent:
                said = f"no collective in {last} steps: what the GPUs exchange more rarely is not in the step"
                self.remarks = (*self.remarks, said)
            self._finish(step, last, f"equal to step {last - 1}")
        elif not equal and last >= MOST_STEPS and (period := self._period()):
            self.in_turn, self.accumulated.leaving_out = period, False
            self._begin_anew()
        elif not equal and last > WARMING_STEPS:
            if sum(len(each.calls) for each in self.different.values()) < MOST_CALLS:
                self.different[last] = step
            if last >= MOST_STEPS and last >= self._most_drawn():
                self._finish_middle()

    def _most_drawn(self) -> int:
        """Return the number of the last step that is drawn."""
        calls = max(len(each.calls) for each in islice(self.different.values(), MOST_STEPS - WARMING_STEPS))
        return MOST_DRAWN if calls <= MOST_DRAWN_CALLS else MOST_STEPS

    def _period(self) -> int:
        """Return after how many steps they begin anew; 0 if they do not, or if on one of several GPUs they differ by
        the shapes of its data only: those of other ranks may begin anew after another number.
        """
        steps = self.digests if self.in_turn == 1 else []
        numbers = range(2, MOST_IN_TURN + 1)
        found = next((number for number in numbers if steps and steps[-number:] == steps[-2 * number : -number]), 0)
        turn = [self.step, *(each for number, each in self.different.items() if number > len(steps) - found)]
        alike = self.gpus > 1 and len({tuple(call.name for call in each.calls) for each in turn}) == 1
        return 0 if alike else found

    def _finish_middle(self) -> None:
        """Finish with the middle one of the steps that were drawn, by work; those of a job communicate like the last.

        Each of several GPUs has data of its own, and all wait for the one that has the most: its work is below what the
        half of a single GPU's steps is below, to the power of one over their number.
        """
        work = {number: work_of(each.calls) for number, each in self.different.items()}
        alike = [number for number in work if work[number].collectives == work[max(work)].collectives]
        alike.sort(key=lambda number: work[number].elements.total())
        taken = int(len(alike) * 0.5 ** (1 / self.gpus))
        number = alike[taken]
        least, own, most = (work[alike[place]].elements.total() for place in (0, taken, -1))
        told = "not equal to the step before"
        self.drawn = len(alike) > 1
        if self.drawn:
            spread = f"{least / own:.2f} to {most / own:.2f} times its work"
            which = "the middle one" if self.gpus == 1 else f"number {taken + 1} by work"
            told = f"{which} of {len(alike)} different steps ({spread})"
            told += f", as the slowest of {self.gpus} GPUs has it" if self.gpus > 1 else ""
            self.remarks = self._new_convolutions()
        self._finish(self.different[number], number, told)

    def _new_convolutions(self) -> tuple[str, ...]:
        """Return a remark if the last step still has convolutions of shapes that are new."""
        *earlier, last = (
            [(each.name, shape_of(each.inputs)) for each in step.calls if "convolution" in each.name]
            for step in self.different.values()
        )
        known = {each for step in earlier for each in step}
        count = sum(each not in known for each in last)
        if not count:
            return ()
        return (
            f"{count} of {len(last)} convolutions and gradients in step {max(self.different)} have inputs of a shape "
            "that no earlier step had: cuDNN looks for their kernels first, with or without cudnn.benchmark (1.5 ms "
            "each on an H200); the predicted time is that of shapes which were seen before",
        )

    def _finish(self, step: RecordedStep, number: int, told: str) -> None:
        for group in self._groups:  # passes of the step itself
            if not group.replayed:
                self.evaluations.pop((group.title, group.line), None)
        if step is not self.step or self.in_turn > 1:  # whose periods are not known
            self.periodic.clear()
        if any(each is self.richest for _, _, each in self.rare()):
            self.richest = None
        most, taken = max(self.backward, default=0), self.backward[number - 1] if self.backward else 0
        rich = self.richest.calls if most > taken and self.richest is not None else ()
        if rich and work_of(rich).elements.total() > _MORE_WORK * work_of(step.calls).elements.total():
            other = f"step {self.backward.index(most) + 1} had {most} backward passes, this one {taken}"
            told += f"; {other}: what is not done in every step is left out"
        else:
            self.richest = None
        if step.repeated is not None:
            told = f"{step.repeated.more:,} of its {len(step.passes):,} passes, which are alike, not run; {told}"
        turn = f" (each is {self.in_turn} of its steps, which differ)" if self.in_turn > 1 else ""
        self.finish(step, f"step {number} of {self.title}{turn}, {len(step.calls):,} operators, {told}")

    def rare(self) -> Iterator[tuple[int, bool, RecordedStep]]:
        """Yield what the program trains with besides the last step: after how many steps it does so again, whether with
        the work of every step, and the calls.
        """
        usual = self.periods | {1}
        for periods, step in self.periodic.items():
            more = periods - usual
            if len(more) == 1:
                yield max(more), bool(periods & usual), step

    def at_end(self) -> None:
        """Finish at the end of the program, which was not stopped at a steady step."""
        if not self.digests and (self.recorder.enabled or self.recorder.passing_over):
            self._passed_over = self.passes.passed_over
            repeated = self.accumulated.end_step()
            self.title, self.step = "the program", replace(self.recorder.cut(), repeated=repeated)
        if not self.step.calls:
            raise ModelError(
                "the program ended without a step on the GPU: no module was called there and no optimizer took a step"
            )
        if len(self.digests) >= MOST_STEPS and self.different:
            self._finish_middle()
            return
        told = "the last before the program ended"
        told += "; its optimizer took no step" if self.optimizers and not self.steps else ""
        told += f"; {self._passed_over:,} passes, like those before them, not run" if self._passed_over else ""
        told += "" if self.whole else "; its last passes are taken as those before them, run it for more steps"
        self._finish(self.step, len(self.digests) or 1, told)


def digest(calls: Sequence[OperatorCall]) -> str:
    """Digest of the operators of a step on the GPU: names, shapes and types of their inputs; alike in all processes."""
    rows = [(call.name, shape_of(call.inputs)) for call in calls if _is_on_gpu(call)]
    return sha256(repr(rows).encode()).hexdigest()


def cut_out(calls: Sequence[OperatorCall]) -> tuple[OperatorCall, ...]:
    """Return neighbouring ``calls`` numbered from zero, as a trace of their own."""
    first = calls[0].id if calls else 0
    inside = {call.id for call in calls}
    return tuple(
        replace(call, id=call.id - first, parent=call.parent - first if call.parent in inside else None)
        for call in calls
    )


def _is_on_gpu(call: OperatorCall) -> bool:
    return any(each.device != "cpu" for each in tensors((*call.inputs, *call.outputs)))


def run_program(job: ProgramJob, scratch: Path, answer: Callable[[FoundStep | Exception], NoReturn]) -> None:
    """Run the program of ``job`` in this process; ``answer`` is called with its step, or the error of a program that it
    starts, and does not return.

    ``scratch``: folder for files that the program must not find later.
    """
    launch, place = job.launch, job.place
    recorder = Recorder({})
    recorder.enabled = False
    recorder.regions, recorder.custom = Regions(hand_on=recorder.hand_on), CustomOperators()
    recorder.noting_lines = recorder.counting = True
    recorder.communication = Communication(recorder)
    notes: list[str] = []

    def note(line: str) -> None:
        if line not in notes:
            notes.append(line)

    def trace_of(step: RecordedStep) -> OperatorTrace:
        return OperatorTrace(
            rank=place.rank,
            world_size=place.world_size,
            process_groups=dict(recorder.communication.groups.ranks),
            source=launch.title,
            compiled=bool(recorder.compiled),
            **{each.name: getattr(step, each.name) for each in fields(step)},
        )

    def finish(step: RecordedStep, told: str) -> None:
        trace = trace_of(step)
        rank = CapturedRank(
            trace, frozenset(recorder.communication.peers), (), _samples(step), switches=tf32_switches()
        )
        files.undo()
        apart = tuple(evaluations(trace))
        answer(FoundStep(rank, job.mailbox, told, (*notes, *finder.remarks), apart, finder.drawn, finder.loading))

    def evaluations(step: OperatorTrace) -> Iterator[Evaluation]:
        for group, run, parts in finder.evaluations.values():
            if run:
                trace = replace(
                    step, calls=cut_out(run), ranges=NamedRanges(), passes=(), regions=parts, graphs={}, repeated=None
                )
                yield Evaluation(trace, group.passes, group.told)
        for every, whole, rare in finder.rare():
            told = f"every {every:,} steps, {'a whole step with more work' if whole else 'besides the step'}"
            yield Evaluation(trace_of(rare), 1, told, every, whole)
        if finder.richest is not None:
            passes = max(finder.backward)
            yield Evaluation(trace_of(finder.richest), 1, f"a step with {passes} backward passes, as a whole")

    finder = StepFinder(recorder, finish, place.world_size)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, launch.environment))
        stack.enter_context(silent_loggers())
        local = min(place.gpus_per_node, place.world_size)
        stack.enter_context(driver_tools(job.options.seen_gpu, local, scratch))
        hub = stack.enter_context(needs_met(job.made_up, scratch, note, finder.batches))
        stack.enter_context(cuda_packages(note))
        stack.enter_context(reporting(launch.title))
        stack.enter_context(recording(recorder, job.options, steady=False))
        launched = place.world_size > 1 or launch.processes is not None
        stack.enter_context(fake_world(place, recorder, job.mailbox, launched=launched))
        stack.enter_context(patch.dict(os.environ, launch.rank_environment(place.environment())))
        stack.enter_context(not_yet_started())
        stack.enter_context(spawned_ranks(place))
        stack.enter_context(patched_libraries(recorder))
        stack.enter_context(named_generation(note))
        stack.enter_context(deepspeed_package(recorder, names_deepspeed(launch), note))
        files = stack.enter_context(kept_files(Path.cwd(), scratch, note))
        stack.enter_context(modules_of_the_host())
        stack.enter_context(finder.watching())
        stack.enter_context(HostTensors())
        job.mailbox.wait = partial(_wait_for_parcels, scratch, job.mailbox, recorder)
        job.mailbox.pause = partial(_is_waiting, recorder)

        def start(inner: Launch, count: int) -> None:
            try:
                if count != place.world_size:
                    raise OtherGpusError(f"the program starts {count} processes of {inner.title}", count)
                with reporting(inner.title):
                    _start(inner, hub)
            except (ModelError, InputError) as error:
                answer(error)  # what has started it might go on without it, or catch all errors

        stack.enter_context(started_programs(place, start))
        with reporting(launch.title):  # before the job is taken down
            _start(launch, hub)
            finder.at_end()


def _wait_for_parcels(scratch: Path, mailbox: Parcels, recorder: Recorder, wait: NotYetSent) -> Any:
    """Tell the process that started this one that its rank waits, and return all objects sent when it answers."""
    asked, parcels = scratch / "waiting", scratch / "parcels"
    (scratch / "unfinished").write_bytes(pickle.dumps(WaitingRank(wait, mailbox)))
    (scratch / "unfinished").replace(asked)
    while not parcels.exists():
        _is_waiting(recorder)
        time.sleep(PAUSE_SECONDS)
    sent = pickle.loads(parcels.read_bytes())
    parcels.unlink()
    return sent


def _is_waiting(recorder: Recorder) -> None:
    """Note that the rank is not stuck, but waits for another one."""
    recorder.called += 1


def _samples(step: RecordedStep) -> int | None:
    """Samples of a step: the length that all passes of the outermost module have in common, if there is one."""
    common = frozenset.intersection(*step.passes) if step.passes else frozenset()
    return next(iter(common)) if len(common) == 1 else None


def _start(launch: Launch, hub: Hub) -> None:
    """Run the program as ``__main__``."""
    folder = os.getcwd()
    place = [f"{launch.rank_option}={os.environ['LOCAL_RANK']}"] if launch.rank_option else []
    sys.argv = [launch.program, *place, *launch.arguments]
    if launch.module:
        sys.path.insert(0, folder)
        run: Callable[[], Any] = partial(runpy.run_module, launch.program, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(launch.program).resolve().parent))
        run = partial(runpy.run_path, launch.program, run_name="__main__")
    try:
        run()
    except SystemExit as end:
        if end.code not in (None, 0):
            said = f"{end.code}" if isinstance(end.code, str) else f"status {end.code}; its own message is above"
            raise ModelError(f"{launch.title}: the program ended before its first step: {said}") from None
    except (ModelError, InputError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        missing = told_missing(error, frames, hub) or missing_package(error, frames)
        if missing is None:
            if hub.stood_in:  # which may not be what the program expects
                error.add_note(f"; {hub.stood_in} (made up: if that is why, put data of the program's form there)")
            raise
        raise ModelError(missing) from None


def end_started(process: int) -> None:
    """End the processes that ``process`` has started, also in sessions of their own, and those that they have."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(place.parent.name)] = int(place.read_text(errors="replace").rpartition(")")[2].split()[1])
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    for each in found[1:]:
        with suppress(OSError):
            os.kill(each, signal.SIGKILL)


def _end_after(parent: int) -> None:
    """End this process, and those that it has started, when ``parent``, which started it, has ended without ending it:
    by SIGKILL, or by a signal while it started it.
    """
    while os.getppid() == parent:
        time.sleep(PAUSE_SECONDS)
    end_started(os.getpid())
    _end_process(1)


def main(job_file: str, answer_file: str) -> None:
    """Run the job in ``job_file``; the step, or the error, is written to ``answer_file``."""
    with open(job_file, "rb") as file:
        job: ProgramJob = pickle.load(file)
    process = os.getpid()
    Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_WRITTEN, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def answer(found: object) -> NoReturn:
        if isinstance(found, Exception) and not isinstance(found, OtherGpusError):
            found = (InputError if isinstance(found, InputError) else ModelError)(str(found))
        if os.getpid() == process:
            with open(answer_file, "wb") as file:
                pickle.dump(found, file)
            end_started(process)
        sys.stdout.flush()
        sys.stderr.flush()
        _end_process(0)

    try:
        run_program(job, Path(job_file).parent, answer)
    except (ModelError, InputError) as error:
        answer(error)
