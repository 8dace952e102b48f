"""The measuring process: builds, verifies and times kernels. May crash or hang; the runner then starts another.

Run as ``python -m schedules.worker FD`` by :class:`schedules.runner.Runner`, which talks to it over that descriptor.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from costmodel.measurements import config_key
from costmodel.operators import Operator
from schedules.arguments import Case, WrongValues, make_case
from schedules.compilation import compile_kernel
from schedules.messages import Answer, Candidate, FailureKind, Outcome, Phase, ProgramRequest, Request, Setup
from schedules.program import LoadedProgram, Stage
from schedules.template import Template
from schedules.timing import Arm, Call, TimingProtocol, time_arms

# Operators whose arguments are kept, and their memory together: a tuner works on a few in turn.
_CACHED_CASES = 16
_CACHED_BYTES = 2**30
_CACHED_KERNELS = 1024  # compiled candidates that are kept: the best are compared again, and with others
# So often the runner hears that timing goes on. More often would wake it on cores that are being timed.
_PULSE_SECONDS = 0.5


class _Failure(Exception):
    def __init__(self, kind: FailureKind, message: str, tainted: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.tainted = tainted


@dataclass(frozen=True, eq=False)
class _Step:
    """One kernel of an arm, built and verified; ``first`` is the output it was verified with."""

    function: Callable[..., object]
    case: Case
    first: Any


class Worker:
    """Answers requests, one after the other: nothing is compiled while something is timed."""

    def __init__(self, setup: Setup, report: Callable[[Phase], None]) -> None:
        self._setup = setup
        self._report = report
        self._templates = _load(setup.templates)
        self._cases: OrderedDict[Operator, Case] = OrderedDict()
        self._kernels: OrderedDict[tuple[object, ...], Callable[..., object]] = OrderedDict()
        self._overheads: dict[int, float] = {}

    def answer(self, request: Request | ProgramRequest) -> Answer:
        if isinstance(request, ProgramRequest):
            return Answer(tuple(self._rehearse(request)))
        return self._measure(request)

    def _measure(self, request: Request) -> Answer:
        outcomes: dict[int, Outcome] = {}
        arms: dict[int, tuple[list[_Step], Arm]] = {}
        tainted = False
        for index, candidates in enumerate(request.arms):
            try:
                arms[index] = self._prepared(candidates, index)
            except _Failure as failure:
                tainted = tainted or failure.tainted
                outcomes[index] = Outcome(None, failure.kind, str(failure))
        if arms:
            timed, broken = self._time(arms, request.best_seconds)
            outcomes.update(timed)
            tainted = tainted or broken
        return Answer(tuple(outcomes[index] for index in range(len(request.arms))), tainted)

    def _rehearse(self, request: ProgramRequest) -> Iterator[Outcome]:
        """Outcomes of whole networks; their kernels are compiled as they were when they were verified."""
        stage = Stage(self._templates, self._setup.cpu)
        loaded: list[LoadedProgram | Outcome] = []
        for index, program in enumerate(request.programs):
            self._report(Phase("building", index))
            try:
                functions = [self._function(*step.candidate, index) for step in program]
                loaded.append(stage.load(program, functions, self._overhead))
            except Exception as error:
                loaded.append(Outcome(None, "build", _one_line(error)))
        stage.allocate()
        running = {index: each for index, each in enumerate(loaded) if isinstance(each, LoadedProgram)}
        pulse = self._pulse()
        for _ in range(request.rounds):
            for index, each in running.items():
                self._report(Phase("timing", index))
                each.sample(request.runs, partial(pulse, index))
        return (one.outcome() if isinstance(one, LoadedProgram) else one for one in loaded)

    def _pulse(self) -> Callable[[int], None]:
        """Tells the runner which arm (or program) is timed, now and then: only one that stands still is a hang, not
        many slow ones."""
        last = time.monotonic()

        def pulse(index: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _PULSE_SECONDS:
                last = now
                self._report(Phase("timing", index))

        return pulse

    def _function(self, operator: Operator, config: Mapping[str, int], index: int) -> Callable[..., object]:
        template = self._templates(operator, self._setup.cpu)
        if template is None:
            raise ValueError(f"no template covers {operator}")
        self._report(Phase("building", index))
        return self._compile(template, operator, config)

    def _prepared(self, candidates: Sequence[Candidate], index: int) -> tuple[list[_Step], Arm]:
        steps = [self._step(candidate, index) for candidate in candidates]
        return steps, self._arm(steps)

    def _time(
        self, arms: Mapping[int, tuple[list[_Step], Arm]], best_seconds: float | None
    ) -> tuple[dict[int, Outcome], bool]:
        """Outcomes of the arms, each verified once more; whether memory may be corrupt."""
        first = next(iter(arms))
        outcomes: dict[int, Outcome] = {}
        tainted = False
        self._report(Phase("timing", first))
        for steps, arm in arms.values():
            arm.overhead_seconds = sum(self._overhead(len(step.case.rotation[0])) for step in steps)
        order, pulse = list(arms), self._pulse()
        timed = [arm for _, arm in arms.values()]
        time_arms(timed, self._setup.protocol, best_seconds, lambda position: pulse(order[position]))
        for index, (steps, arm) in arms.items():
            self._report(Phase("running", index))
            try:
                for step in steps:
                    _verify_again(step)
                outcomes[index] = Outcome(arm.seconds, None, "", arm.median_seconds, len(arm.samples))
            except _Failure as failure:
                tainted = tainted or failure.tainted
                outcomes[index] = Outcome(None, failure.kind, str(failure))
        return outcomes, tainted

    def _step(self, candidate: Candidate, arm: int) -> _Step:
        operator, config = candidate
        self._report(Phase("preparing", arm))
        try:
            template = self._templates(operator, self._setup.cpu)
            if template is None:
                raise _Failure("build", "no template covers the operator")
            case = self._case(operator, template)
            self._report(Phase("building", arm))
            function = self._compile(template, operator, config)
        except _Failure:
            raise
        except Exception as error:
            raise _Failure("build", _one_line(error)) from error
        self._report(Phase("running", arm))
        _run_and_verify(function, case, 0)
        return _Step(function, case, case.output.array.copy())

    def _case(self, operator: Operator, template: Template) -> Case:
        case = self._cases.pop(operator, None)
        if case is None:
            case = make_case(operator, template, self._setup.cpu, self._setup.protocol.copies)
        self._cases[operator] = case
        while len(self._cases) > 1 and (
            len(self._cases) > _CACHED_CASES or sum(each.size_bytes for each in self._cases.values()) > _CACHED_BYTES
        ):
            self._cases.popitem(last=False)
        return case

    def _compile(self, template: Template, operator: Operator, config: Mapping[str, int]) -> Callable[..., object]:
        key = (operator, config_key(config))
        kernel = self._kernels.pop(key, None)
        if kernel is None:
            kernel = compile_kernel(template.build(operator, config, self._setup.cpu), self._setup.cpu)
        self._kernels[key] = kernel
        if len(self._kernels) > _CACHED_KERNELS:
            self._kernels.popitem(last=False)
        return kernel

    def _arm(self, steps: list[_Step]) -> Arm:
        """The calls of all steps in rotation; a step reads the output of the one before where the shapes fit."""
        calls: list[Call] = []
        for turn in range(max(len(step.case.rotation) for step in steps)):
            previous: Any = None
            for step in steps:
                arguments = step.case.rotation[turn % len(step.case.rotation)]
                if previous is not None and tuple(previous.shape) == tuple(arguments[0].shape):
                    arguments = (previous, *arguments[1:])
                calls.append((step.function, arguments))
                previous = arguments[-1]
        return Arm(calls, len(steps))

    def _overhead(self, count: int) -> float:
        """Seconds of a call with ``count`` tensor arguments from Python that does nothing."""
        if count not in self._overheads:
            arm = Arm([_empty_call(count)], 1)
            time_arms([arm], TimingProtocol())
            self._overheads[count] = arm.seconds
        return self._overheads[count]


def _run_and_verify(function: Callable[..., object], case: Case, turn: int) -> None:
    case.output.reset()
    try:
        function(*case.rotation[turn])
    except Exception as error:
        raise _Failure("run", _one_line(error)) from error
    try:
        case.verify()
    except WrongValues as error:
        raise _Failure("wrong", str(error), tainted=not case.output.guards_intact) from error


def _verify_again(step: _Step) -> None:
    """A kernel with a race, or one that overwrites its inputs, may be right once."""
    try:
        _run_and_verify(step.function, step.case, -1)
    except _Failure as failure:
        raise _Failure(failure.kind, f"right at first, after the timing runs {failure}", tainted=True) from failure
    if not (step.case.output.array == step.first).all():
        raise _Failure("wrong", "two runs on the same data differ", tainted=True)


def _empty_call(count: int) -> Call:
    import numpy as np
    import tvm
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    with IRBuilder() as builder, T.prim_func():
        T.func_name("main")
        for index in range(count):
            T.arg(f"argument{index}", T.buffer((1,), "float32"))
        T.evaluate(0)
    function = tvm.compile(builder.get(), target="llvm")["main"]
    return function, tuple(tvm.runtime.tensor(np.zeros(1, np.float32)) for _ in range(count))


def _load(reference: str) -> Callable[..., Template | None]:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:400]


def _prefer_as_out_of_memory_victim() -> None:
    """A candidate that eats all memory must not take the tuner with it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def serve(connection: Connection) -> None:
    """Answers until the other side closes."""
    _prefer_as_out_of_memory_victim()
    setup: Setup = connection.recv()
    sys.path[:] = setup.search_path

    def report(phase: Phase) -> None:
        # The runner kills a worker that hangs; should the runner be gone, the timer does (its default action).
        signal.setitimer(signal.ITIMER_REAL, 2.0 * setup.phase_seconds + 5.0)
        connection.send(phase)

    import tvm  # noqa: F401  (takes seconds: before "ready", so that it counts for no candidate)

    worker = Worker(setup, report)
    report(Phase("ready"))
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(worker.answer(request))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
