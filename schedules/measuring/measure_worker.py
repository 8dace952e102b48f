"""Measuring process: builds, verifies and times kernels. It may crash or hang; the runner then starts another.

Run as ``python -m schedules.measuring.measure_worker FD PARENT`` by the
:class:`schedules.measuring.measure_runner.Runner` of process PARENT, which communicates over that descriptor. Building
and timing alternate: during a build, threads of TVM's pool (which spin for 15 ms after a task) make kernels 2 to 4
times too slow.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from costmodel.base.process import end_with_parent
from costmodel.cost_model import config_key
from costmodel.operators.layers import Operator
from schedules.contract.kernel_compilation import compile_kernel
from schedules.contract.template import Template
from schedules.contract.tvm_import import import_tvm_alone
from schedules.measuring.kernel_program import LoadedProgram, ProgramBuffers
from schedules.measuring.kernel_verification import (
    KernelFailure,
    VerificationCase,
    VerifiedKernel,
    make_case,
    one_line,
    verified,
)
from schedules.measuring.timing_protocol import (
    Answer,
    Arm,
    CompileRequest,
    KernelCall,
    KernelCandidate,
    MeasureOutcome,
    MeasureRequest,
    ProgramRequest,
    Setup,
    TimingProtocol,
    WorkerPhase,
    time_arms,
)

# Maximum number and memory of operators whose arguments are kept: a tuner alternates between a few.
_CACHED_CASES = 16
_CACHED_BYTES = 2**30
_CACHED_KERNELS = 1024  # compiled candidates that are kept: the best are compared again
# Interval of progress messages during timing. Shorter ones would wake the runner on cores that are being timed.
_PULSE_SECONDS = 0.5


class MeasureWorker:
    """Answers requests sequentially: nothing is compiled while something is timed."""

    def __init__(self, setup: Setup, report: Callable[[WorkerPhase], None]) -> None:
        self._setup = setup
        self._report = report
        self._templates = _load(setup.templates)
        self._cases: OrderedDict[tuple[Operator, str], VerificationCase] = OrderedDict()
        self._kernels: OrderedDict[tuple[object, ...], Callable[..., object]] = OrderedDict()
        self._overheads: dict[int, float] = {}
        # Creating the weights of a network takes a second, and rehearsals follow one another.
        self._buffers = ProgramBuffers(self._templates, setup.cpu)

    def answer(self, request: MeasureRequest | ProgramRequest | CompileRequest) -> Answer:
        """Execute one request."""
        if isinstance(request, ProgramRequest):
            return Answer(tuple(self._rehearse(request)))
        if isinstance(request, CompileRequest):
            self._compile_together(enumerate(request.candidates))
            return Answer(())
        return self._measure(request)

    def _compile_together(self, candidates: Iterable[tuple[int, KernelCandidate]]) -> None:
        """Compile candidates, each with the index of its arm or program, on all cores: TVM and LLVM release Python's
        lock.

        Compilation failures are ignored here and reported when the kernel is needed.
        """
        with ThreadPoolExecutor(self._setup.cpu.threads) as pool:
            compiling: dict[tuple[object, ...], tuple[int, Future[Callable[..., object]]]] = {}
            for index, (operator, config) in candidates:
                template = self._templates(operator, self._setup.cpu)
                key = (operator, config_key(config))
                if template is None or key in self._kernels or key in compiling:
                    continue
                self._report(WorkerPhase("building", index))
                with contextlib.suppress(Exception):
                    function = template.build(operator, config, self._setup.cpu)
                    compiling[key] = index, pool.submit(compile_kernel, function, self._setup.cpu)
            for made, (index, future) in compiling.items():
                self._report(WorkerPhase("building", index))
                with contextlib.suppress(Exception):
                    self._keep(made, future.result())

    def _measure(self, request: MeasureRequest) -> Answer:
        outcomes: dict[int, MeasureOutcome] = {}
        arms: dict[int, tuple[list[VerifiedKernel], Arm]] = {}
        tainted = False
        for index, candidates in enumerate(request.arms):
            try:
                arms[index] = self._prepared(candidates, index)
            except KernelFailure as failure:
                tainted = tainted or failure.tainted
                outcomes[index] = MeasureOutcome(None, failure.kind, str(failure))
        if arms:
            timed, broken = self._time(arms, request.best_seconds)
            outcomes.update(timed)
            tainted = tainted or broken
        return Answer(tuple(outcomes[index] for index in range(len(request.arms))), tainted)

    def _rehearse(self, request: ProgramRequest) -> Iterator[MeasureOutcome]:
        """Outcomes of whole networks; their kernels are compiled as when they were verified."""
        buffers = self._buffers
        self._compile_together(
            (index, step.candidate) for index, program in enumerate(request.programs) for step in program
        )
        loaded: list[LoadedProgram | MeasureOutcome] = []
        for index, program in enumerate(request.programs):
            self._report(WorkerPhase("building", index))
            try:
                functions = [self._function(*step.candidate, index) for step in program]
                loaded.append(buffers.load(program, functions, self._overhead))
            except Exception as error:
                loaded.append(MeasureOutcome(None, "build", one_line(error)))
        buffers.allocate()
        running = {index: each for index, each in enumerate(loaded) if isinstance(each, LoadedProgram)}
        pulse = self._pulse()
        for _ in range(request.rounds):
            for index, each in running.items():
                self._report(WorkerPhase("timing", index))
                each.sample(request.runs, partial(pulse, index))
        if buffers.kept_bytes > _CACHED_BYTES:
            self._buffers = ProgramBuffers(self._templates, self._setup.cpu)
        return (one.outcome() if isinstance(one, LoadedProgram) else one for one in loaded)

    def _pulse(self) -> Callable[[int], None]:
        """Return a function that reports the arm (or program) being timed at intervals, so that many slow ones are
        not taken for a hang.
        """
        last = time.monotonic()

        def pulse(index: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _PULSE_SECONDS:
                last = now
                self._report(WorkerPhase("timing", index))

        return pulse

    def _function(self, operator: Operator, config: Mapping[str, int], index: int) -> Callable[..., object]:
        template = self._templates(operator, self._setup.cpu)
        if template is None:
            raise ValueError(f"no template covers {operator}")
        self._report(WorkerPhase("building", index))
        return self._compile(template, operator, config)

    def _prepared(self, candidates: Sequence[KernelCandidate], index: int) -> tuple[list[VerifiedKernel], Arm]:
        kernels = [self._verified(candidate, index) for candidate in candidates]
        return kernels, self._arm(kernels)

    def _time(
        self, arms: Mapping[int, tuple[list[VerifiedKernel], Arm]], best_seconds: float | None
    ) -> tuple[dict[int, MeasureOutcome], bool]:
        """Outcomes of the arms, each verified once more, and whether memory may be corrupt."""
        first = next(iter(arms))
        outcomes: dict[int, MeasureOutcome] = {}
        tainted = False
        self._report(WorkerPhase("timing", first))
        for kernels, arm in arms.values():
            arm.overhead_seconds = sum(self._overhead(len(kernel.case.rotation[0])) for kernel in kernels)
        order, pulse = list(arms), self._pulse()
        timed = [arm for _, arm in arms.values()]
        time_arms(timed, self._setup.protocol, best_seconds, lambda position: pulse(order[position]))
        for index, (kernels, arm) in arms.items():
            self._report(WorkerPhase("running", index))
            try:
                for kernel in kernels:
                    kernel.verify_again()
                outcomes[index] = MeasureOutcome(arm.seconds, None, "", arm.median_seconds, len(arm.samples))
            except KernelFailure as failure:
                tainted = tainted or failure.tainted
                outcomes[index] = MeasureOutcome(None, failure.kind, str(failure))
        return outcomes, tainted

    def _verified(self, candidate: KernelCandidate, arm: int) -> VerifiedKernel:
        operator, config = candidate
        self._report(WorkerPhase("preparing", arm))
        try:
            template = self._templates(operator, self._setup.cpu)
            if template is None:
                raise KernelFailure("build", "no template covers the operator")
            case = self._case(operator, template.for_config(config))
            self._report(WorkerPhase("building", arm))
            function = self._compile(template, operator, config)
        except KernelFailure:
            raise
        except Exception as error:
            raise KernelFailure("build", one_line(error)) from error
        self._report(WorkerPhase("running", arm))
        return verified(function, case)

    def _case(self, operator: Operator, template: Template) -> VerificationCase:
        key = (operator, template.family)
        case = self._cases.pop(key, None)
        if case is None:
            case = make_case(operator, template, self._setup.cpu, self._setup.protocol.copies)
        self._cases[key] = case
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
        self._keep(key, kernel)
        return kernel

    def _keep(self, key: tuple[object, ...], kernel: Callable[..., object]) -> None:
        self._kernels[key] = kernel
        if len(self._kernels) > _CACHED_KERNELS:
            self._kernels.popitem(last=False)

    def _arm(self, kernels: list[VerifiedKernel]) -> Arm:
        """Calls of all kernels in rotation; a kernel reads the output of the previous one if shapes match."""
        calls: list[KernelCall] = []
        for turn in range(max(len(kernel.case.rotation) for kernel in kernels)):
            previous: Any = None
            for kernel in kernels:
                arguments = kernel.case.rotation[turn % len(kernel.case.rotation)]
                if previous is not None and _alike(previous, arguments[0]):
                    arguments = (previous, *arguments[1:])
                calls.append((kernel.function, arguments))
                previous = arguments[-1]
        return Arm(calls, len(kernels))

    def _overhead(self, count: int) -> float:
        """Seconds of a call with ``count`` tensor arguments from Python that does nothing."""
        if count not in self._overheads:
            arm = Arm([_empty_call(count)], 1)
            time_arms([arm], TimingProtocol())
            self._overheads[count] = arm.seconds
        return self._overheads[count]


def _alike(one: Any, other: Any) -> bool:
    """True if two tensors have the same shape and dtype."""
    return tuple(one.shape) == tuple(other.shape) and one.dtype == other.dtype


def _empty_call(count: int) -> KernelCall:
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


def _prefer_as_out_of_memory_victim() -> None:
    """Prefer this process as out-of-memory victim: a candidate that uses all memory must not kill the tuner."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes."""
    _prefer_as_out_of_memory_victim()
    setup: Setup = connection.recv()
    sys.path[:] = setup.search_path

    def report(phase: WorkerPhase) -> None:
        # The runner kills a hanging worker; without a runner the timer does (its default action).
        signal.setitimer(signal.ITIMER_REAL, 2.0 * setup.phase_seconds + 5.0)
        connection.send(phase)

    import_tvm_alone()  # takes seconds: before "ready", so that it is not part of a candidate's time

    worker = MeasureWorker(setup, report)
    report(WorkerPhase("ready"))
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            request = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(worker.answer(request))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
