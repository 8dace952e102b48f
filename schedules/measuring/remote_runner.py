"""Measurement of kernels on the CPUs of a tracker's servers (:mod:`schedules.measuring.remote_server`).

Like :class:`schedules.measuring.measure_runner.Runner`, which measures there. Whole networks are not run there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, MachineError, Say, TuningError
from costmodel.machines.machine_records import Host, Machine
from costmodel.machines.record_file import convert_record as parsed_record
from costmodel.operators.any_operator import to_record
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.measuring.measure_runner import COMPILED_TOGETHER
from schedules.measuring.remote_server import parse_address, versions
from schedules.measuring.timing_protocol import KernelCandidate, KernelProgram, MeasureOutcome

_CONNECT_SECONDS = 5.0


class RemoteRunner:
    """Context manager for measurements on all free servers of a key.

    ``cpu``: CPU of the servers, on ``threads`` threads (default: their cores); ``host``: its identity in machine files;
    ``servers``: number of servers that measure at the same time. Raises ``InputError``: no tracker at the address, no
    server of ``key``, more threads than cores, servers with different CPUs or another version of TVM or the templates.
    """

    def __init__(self, tracker: str, key: str, threads: int | None = None, say: Say = lambda _: None) -> None:
        self._place = f"--key {key}: a server of {tracker}"
        self._sessions = _sessions(tracker, key)
        self.servers = len(self._sessions)
        found = [self._call(session, "describe", threads=threads) for session in self._sessions]
        cpus = [CpuTarget(**{**each["cpu"], "features": tuple(each["cpu"]["features"])}) for each in found]
        self.cpu = cpus[0]
        self.host = Host(**{**found[0]["host"], "features": tuple(found[0]["host"]["features"])})
        differing = [cpu for cpu in cpus if cpu != self.cpu]
        if differing:
            raise InputError(
                f"--key {key}: its servers have different CPUs, {self.cpu.key} and {differing[0].key}; "
                "give each kind of CPU a key of its own"
            )
        for each in found:
            if each["versions"] != versions():
                raise InputError(
                    f"--key {key}: a server has {each['versions']}, here are {versions()}; install the same versions"
                )
        say(f"{self.servers} server(s) of {key}: {found[0]['name']}, {self.cpu.mcpu}, {self.cpu.threads} threads")

    def calibrate(self) -> Machine:
        """Machine model of the servers, measured quickly on one of them."""
        record = self._call(self._sessions[0], "calibrate", threads=self.cpu.threads)
        return parsed_record(record, Machine, Path("machine.yaml"), MachineError)

    def measure_batch(
        self, operator: Operator, configs: Sequence[Mapping[str, int]], best_seconds: float | None = None
    ) -> Iterator[tuple[Mapping[str, int], MeasureOutcome]]:
        """Measure candidates of one operator, a few at a time on every server; yield each result when it is done.

        The candidates of a server that is lost are measured by the others. Raises ``TuningError`` if none is left.
        """
        batches = [configs[start : start + COMPILED_TOGETHER] for start in range(0, len(configs), COMPILED_TOGETHER)]
        free = list(self._sessions)
        running: dict[Future[list[MeasureOutcome]], tuple[Any, Sequence[Mapping[str, int]]]] = {}
        with ThreadPoolExecutor(len(free)) as pool:
            while batches or running:
                while batches and free:
                    session, batch = free.pop(), batches.pop(0)
                    arms = [[(operator, config)] for config in batch]
                    running[pool.submit(self._measure, session, arms, best_seconds, False)] = session, batch
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    session, batch = running.pop(future)
                    try:
                        outcomes = future.result()
                    except TuningError:
                        self._sessions.remove(session)
                        if not self._sessions:
                            raise
                        batches.append(batch)
                        continue
                    free.append(session)
                    for config, outcome in zip(batch, outcomes, strict=True):
                        if outcome.seconds is not None:
                            best_seconds = min(outcome.seconds, best_seconds or outcome.seconds)
                        yield config, outcome

    def compare(self, arms: Sequence[Sequence[KernelCandidate]]) -> list[MeasureOutcome]:
        """Time the arms alternately on one server, A B C A B C."""
        return self._measure(self._sessions[0], arms, None, True)

    def rehearse(self, programs: Sequence[KernelProgram], rounds: int = 5, runs: int = 12) -> list[MeasureOutcome]:
        """Return failures: whole networks are not run on servers."""
        return [MeasureOutcome(None, "run", "whole networks are not run on a tracker's servers") for _ in programs]

    def compilation_seconds(self, candidates: Collection[KernelCandidate]) -> float:
        """Return 0: no network is compiled for servers."""
        return 0.0

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self._sessions.clear()  # ends them: the last references

    def _measure(
        self,
        session: Any,
        arms: Sequence[Sequence[KernelCandidate]],
        best_seconds: float | None,
        alternately: bool,
    ) -> list[MeasureOutcome]:
        records = [[(to_record(operator), dict(config)) for operator, config in arm] for arm in arms]
        answers = self._call(session, "measure", arms=records, best_seconds=best_seconds, alternately=alternately)
        return [MeasureOutcome(**{**each, "step_seconds": tuple(each["step_seconds"])}) for each in answers]

    def _call(self, session: Any, function: str, **request: Any) -> Any:
        """Answer of a server. Raises ``InputError`` with its message, ``TuningError`` if it is lost."""
        try:
            reply = session.get_function(f"schedules.{function}")(json.dumps(request))
        except (RuntimeError, OSError, AttributeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise TuningError(
                f"{self._place} gives no answer ({reason}); start `python -m schedules.measuring.remote_server` there "
                "again, and then this command: records are kept"
            ) from error
        found = json.loads(bytes(reply))
        if "error" in found:
            raise InputError(f"{self._place}: {found['error']}")
        return found["answer"]


def _sessions(tracker: str, key: str) -> list[Any]:
    """A session with each free server of ``key``. Raises ``InputError`` without a tracker or servers."""
    host, port = parse_address(tracker)
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        start = f"python -m tvm.exec.rpc_tracker --host 0.0.0.0 --port {port} --port-end {port + 1}"
        raise InputError(f"--tracker {tracker}: cannot be reached ({error}); start `{start}`") from error
    from tvm import rpc

    try:
        connection = rpc.connect_tracker(host, port)
        free = int(connection.summary()["queue_info"].get(key, {}).get("free", 0))
        # All at once, so that each session is with another server.
        sessions = [connection.request(key, max_retry=3) for _ in range(free)]
        connection.close()
    except (RuntimeError, OSError, ValueError) as error:
        raise InputError(
            f"--tracker {tracker}: is no tracker of TVM's RPC ({error}); "
            "give the address of python -m tvm.exec.rpc_tracker"
        ) from error
    if not sessions:
        server = f"python -m schedules.measuring.remote_server --tracker {tracker} --key {key}"
        raise InputError(f"--key {key}: the tracker at {tracker} has no such server free; start `{server}`")
    return sessions
