"""Measurement of kernels on the CPUs of a tracker's servers: built here, uploaded, verified and timed there.

Like :class:`schedules.measuring.measure_runner.Runner`, with the same alternation, bursts and rotating weights.
Differences: each candidate has a separate session, which the server ends if it hangs; guard bands around the output are
not checked; a crash may end the server of TVM's RPC itself, then the others continue and the crashed candidate is not
tried again. Whole networks are not run there.
"""

from __future__ import annotations

import tempfile
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, Say
from costmodel.cpu.calibration import CpuFacts
from costmodel.machines.machine_records import Host, Machine
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import compile_function
from schedules.contract.template import Template, TensorSpec, numpy_dtype
from schedules.kernels.template_table import template_for
from schedules.measuring.kernel_verification import VerificationCase, WrongValues, make_case, one_line, unwritten_value
from schedules.measuring.remote_server import RemoteServer, Tracker, calibrate_remote, remote_facts, remote_target
from schedules.measuring.timing_protocol import (
    Arm,
    KernelCandidate,
    KernelProgram,
    MeasureOutcome,
    TimingProtocol,
    rotation_copies,
    time_arms,
)

_SESSION_SECONDS = 60.0  # limit of one candidate, or of one comparison
_CALIBRATION_SECONDS = 600.0
_CACHED_CASES = 4


class RemoteRunner:
    """Context manager for measurements on all free servers of a key.

    ``cpu``: CPU of the servers, on ``threads`` threads (default: their cores); ``host``: its identity in machine files;
    ``servers``: number of servers that measure at the same time. Raises ``InputError``: no tracker at the address, no
    server of ``key``, more threads than cores, or servers with different CPUs.
    """

    def __init__(self, tracker: str, key: str, threads: int | None = None, say: Say = lambda _: None) -> None:
        self._tracker = Tracker(tracker, key)
        self._cases: OrderedDict[Operator, VerificationCase] = OrderedDict()
        self._lock = threading.Lock()
        self._protocol = TimingProtocol()
        # Connect to all at once, so that each session is with another server.
        sessions = [self._tracker.connect(_SESSION_SECONDS) for _ in range(self._tracker.servers)]
        found = [self._identify(session, threads) for session in sessions]
        (self.cpu, self._facts), *others = found
        self.servers = len(found)
        differing = [cpu for cpu, _ in others if cpu != self.cpu]
        if differing:
            raise InputError(
                f"--key {key}: its servers have different CPUs, {self.cpu.key} and {differing[0].key}; "
                "give each kind of CPU a key of its own"
            )
        say(f"{self.servers} server(s) of {key}: {self._facts.name}, {self.cpu.mcpu}, {self.cpu.threads} threads")

    @property
    def host(self) -> Host:
        """Identity of the servers' CPU."""
        return self._facts.host

    def calibrate(self, say: Say) -> Machine:
        """Machine model of the servers, measured quickly on one of them."""
        server = self._tracker.connect(_CALIBRATION_SECONDS)
        return calibrate_remote(server, self._facts, self.cpu, say)

    def measure_batch(
        self, operator: Operator, configs: Sequence[Mapping[str, int]], best_seconds: float | None = None
    ) -> Iterator[tuple[Mapping[str, int], MeasureOutcome]]:
        """Measure several candidates of one operator, one at a time on every server; yield each result when it is
        done.
        """
        with ThreadPoolExecutor(self.servers) as pool:
            waiting = list(configs)
            running: dict[Future[list[MeasureOutcome]], Mapping[str, int]] = {}
            try:
                while waiting or running:
                    while waiting and len(running) < self.servers:
                        config = waiting.pop(0)
                        running[pool.submit(self._measure, operator, [config], best_seconds)] = config
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        outcome = future.result()[0]
                        if outcome.seconds is not None:
                            best_seconds = min(outcome.seconds, best_seconds or outcome.seconds)
                        yield running.pop(future), outcome
            except BaseException:
                for future in running:
                    future.cancel()
                raise

    def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]:
        """Time candidates of one operator alternately on one server, A B C A B C; each arm is one candidate."""
        operators = {operator for arm in arms for operator, _ in arm}
        if len(operators) != 1 or any(len(arm) != 1 for arm in arms):
            raise ValueError("a remote comparison is of configurations of one operator")
        return self._measure(operators.pop(), [arm[0][1] for arm in arms], None)

    def rehearse(self, programs: Sequence[KernelProgram], rounds: int = 5, runs: int = 12) -> list[MeasureOutcome]:
        """Return failures: whole networks are not run on servers."""
        return [MeasureOutcome(None, "run", "whole networks are not run on a tracker's servers") for _ in programs]

    def compilation_seconds(self, candidates: Collection[KernelCandidate]) -> float:
        """Return 0: no network is compiled for servers."""
        return 0.0

    def close(self) -> None:
        """Close the connection to the tracker."""
        self._tracker.close()

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _identify(self, server: RemoteServer, threads: int | None) -> tuple[CpuTarget, CpuFacts]:
        facts, flags = remote_facts(server)
        if threads is not None and threads > facts.host.threads:
            raise InputError(f"--threads {threads}: a server of {self._tracker.key} may use {facts.host.threads} cores")
        return remote_target(facts, flags, threads), facts

    def _measure(
        self, operator: Operator, configs: Sequence[Mapping[str, int]], best_seconds: float | None
    ) -> list[MeasureOutcome]:
        """Outcomes of all configurations, timed alternately; a lost session fails the unfinished ones."""
        template = template_for(operator, self.cpu)
        outcomes: dict[int, MeasureOutcome] = {}
        libraries: dict[int, bytes] = {}
        for index, config in enumerate(configs):
            try:
                if template is None:
                    raise ValueError(f"no template covers {operator}")
                libraries[index] = kernel_library(template, operator, config, self.cpu)
            except Exception as error:
                outcomes[index] = MeasureOutcome(None, "build", one_line(error))
        if libraries:
            assert template is not None
            server = self._tracker.connect(_SESSION_SECONDS)  # connection failures are not the candidate's
            try:
                outcomes.update(self._time(server, template, operator, libraries, best_seconds))
            except (RuntimeError, OSError, ValueError) as error:
                lost = MeasureOutcome(None, "crash", f"the server ended the session: {one_line(error)}")
                outcomes.update(dict.fromkeys(libraries.keys() - outcomes.keys(), lost))
        return [outcomes[index] for index in range(len(configs))]

    def _time(
        self,
        server: RemoteServer,
        template: Template,
        operator: Operator,
        libraries: Mapping[int, bytes],
        best_seconds: float | None,
    ) -> dict[int, MeasureOutcome]:
        server.use_threads(self.cpu.threads)
        case = self._case(operator, template)
        rotation = remote_rotation(server, case, template, operator, self.cpu)
        outcomes: dict[int, MeasureOutcome] = {}
        arms: dict[int, RemoteArm] = {}
        modules = []  # keep the modules alive with their kernels
        for index, library in libraries.items():
            module, handle = server.load_kernel(library, f"kernel{index}.so")
            modules.append(module)
            arm = RemoteArm([], 1, server=server, handle=handle, rotation=rotation)
            wrong = self._verified(arm, case)
            if wrong is None:
                arms[index] = arm
            else:
                outcomes[index] = MeasureOutcome(None, "wrong", wrong)
        time_arms(list(arms.values()), self._protocol, best_seconds)
        for index, arm in arms.items():
            wrong = self._verified(arm, case)
            outcomes[index] = (
                MeasureOutcome(arm.seconds, None, "", arm.median_seconds, len(arm.samples))
                if wrong is None
                else MeasureOutcome(None, "wrong", f"right at first, after the timing runs {wrong}")
            )
        return outcomes

    def _verified(self, arm: RemoteArm, case: VerificationCase) -> str | None:
        """Error message on the output of one run, or None if it is correct."""
        output = arm.rotation[0][-1]
        output.copyfrom(_unwritten(case.output_spec))
        arm.restart()
        arm.run(1)
        with self._lock:  # the case has a single output buffer
            case.output.reset()
            case.output.array[...] = output.numpy()
            try:
                case.verify()
            except WrongValues as error:
                return str(error)
        return None

    def _case(self, operator: Operator, template: Template) -> VerificationCase:
        with self._lock:
            case = self._cases.pop(operator, None) or make_case(operator, template, self.cpu, copies=1)
            self._cases[operator] = case
            if len(self._cases) > _CACHED_CASES:
                self._cases.popitem(last=False)
            return case


class RemoteArm(Arm):
    """Calls of one kernel on a server, in rotation over copies of the constants; a sample is one message."""

    def __init__(
        self, calls: Sequence[Any], steps: int, *, server: RemoteServer, handle: int, rotation: list[tuple[Any, ...]]
    ) -> None:
        super().__init__(calls, steps)
        self.rotation = rotation
        self._server = server
        self._handle = handle
        self._turn = 0

    def restart(self) -> None:
        """Start the rotation at the first arguments."""
        self._turn = 0

    def run(self, executions: int) -> float:
        """Seconds of one execution, mean over ``executions``, by the server's clock."""
        seconds = self._server.seconds(self._handle, executions, self._turn, self.rotation)
        self._turn = (self._turn + executions) % len(self.rotation)
        return seconds / executions


def remote_rotation(
    server: RemoteServer, case: VerificationCase, template: Template, operator: Operator, cpu: CpuTarget
) -> list[tuple[Any, ...]]:
    """Arguments of ``case`` on the server, with as many copies of the constants as in local measurements."""
    signature = template.signature(operator, cpu)
    (arguments,) = case.rotation
    first = 1 if signature.gate is None else 2
    constants = range(first, first + len(signature.constants))
    there = [server.tensor(tensor.numpy()) for tensor in arguments[:-1]]
    there.append(server.tensor(_unwritten(signature.output)))
    size = sum(arguments[index].numpy().nbytes for index in constants)
    rotation = [tuple(there)]
    for _ in range(rotation_copies(size, cpu) - 1):
        rotation.append(
            tuple(server.copy(tensor) if index in constants else tensor for index, tensor in enumerate(there))
        )
    return rotation


def _unwritten(spec: TensorSpec) -> np.ndarray:
    """Initial output before a kernel has run."""
    dtype = numpy_dtype(spec.dtype)
    return np.full(spec.shape, unwritten_value(dtype), dtype)


def kernel_library(template: Template, operator: Operator, config: Mapping[str, int], cpu: CpuTarget) -> bytes:
    """Compile a candidate into a shared library with the function ``main``."""
    compiled = compile_function(template.build(operator, config, cpu), cpu)
    with tempfile.TemporaryDirectory(prefix="kernel-") as directory:
        path = Path(directory) / "kernel.so"
        compiled.export_library(str(path))
        return path.read_bytes()
