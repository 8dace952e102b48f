"""A server that measures kernels on its CPU for clients of a tracker (``fusion tune --tracker``).

Run as ``python -m schedules.measuring.remote_server --tracker HOST:PORT --key NAME``. It is a server of TVM's RPC with
three more functions (:func:`describe`, :func:`calibrate` and :func:`measure`; requests and answers are JSON). TVM's RPC
has no password and runs what it is sent: use it in a network that you trust.

Every session is a process, in which a :class:`schedules.measuring.measure_runner.Runner` builds, verifies and times
kernels as it does locally; a kernel that crashes or hangs ends neither the session nor the server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from costmodel.base.command_line import guarded, program_name
from costmodel.base.errors import InputError, ProjectError
from costmodel.base.process import threads_to_use, usable_cores
from costmodel.base.units import whole_number
from costmodel.cpu.calibration import QUICK, read_cpu_facts
from costmodel.cpu.calibration import calibrate as calibrate_cpu
from costmodel.machines.machine_file import machine_record
from costmodel.operators.any_operator import from_record
from schedules.contract.cpu_target import host_target
from schedules.contract.template import TEMPLATE_REVISION
from schedules.measuring.measure_runner import Runner

_runner: Runner | None = None  # of this session


def describe(threads: int | None) -> dict[str, Any]:
    """Start the session on ``threads`` threads (default: the usable cores); return the CPU and the versions."""
    global _runner
    threads_to_use(threads, usable_cores())
    cpu, facts = host_target(threads), read_cpu_facts()
    _runner = Runner(cpu)
    return {"name": facts.name, "host": asdict(facts.host), "cpu": asdict(cpu), "versions": versions()}


def versions() -> str:
    """Versions that must be the same on both sides."""
    import tvm

    return f"TVM {tvm.__version__}, templates {TEMPLATE_REVISION}"


def calibrate(threads: int) -> dict[str, Any]:
    """Measure the CPU quickly; return the content of its machine file."""
    return machine_record(calibrate_cpu(threads, QUICK))


def measure(arms: list[list[list[Any]]], best_seconds: float | None, alternately: bool) -> list[dict[str, Any]]:
    """Measure the arms, each a list of operators and configurations: against each other, or one after the other, each
    of a single candidate of one operator. Return their outcomes.
    """
    assert _runner is not None  # clients call `describe` first
    candidates = [[(from_record(operator), config) for operator, config in arm] for arm in arms]
    if alternately:
        return [asdict(outcome) for outcome in _runner.compare(candidates)]
    operator = candidates[0][0][0]
    configs = [config for ((_, config),) in candidates]
    return [asdict(outcome) for _, outcome in _runner.measure_batch(operator, configs, best_seconds)]


def register() -> None:
    """Add the functions to TVM's global ones, for sessions forked from now on."""
    import tvm_ffi

    for function in (describe, calibrate, measure):
        name = f"schedules.{function.__name__}"
        tvm_ffi.register_global_func(name, partial(_answer, function), override=True)


def _answer(function: Callable[..., Any], request: str) -> bytearray:
    """Call ``function`` with the keywords in ``request``; errors that a user can mend are part of the answer."""
    try:
        answer = {"answer": function(**json.loads(request))}
    except ProjectError as error:
        answer = {"error": str(error)}
    return bytearray(json.dumps(answer).encode())


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; raise ``InputError`` for other text."""
    host, _, port = text.rpartition(":")
    number = whole_number(port)
    if not host or not number or number > 65535:
        raise InputError(f"--tracker {text}: expected HOST:PORT, such as localhost:9190")
    return host, number


@guarded()
def serve(
    tracker: Annotated[str, typer.Option(metavar="HOST:PORT", help="Tracker of TVM's RPC.")],
    key: Annotated[str, typer.Option(help="Name of this kind of CPU; the same on all servers that have it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="First port to try, of 100.")] = 9091,
) -> None:
    """Measure kernels for `fusion tune --tracker`, until stopped. Only in a network that you trust: no password."""
    from tvm.rpc.server import PopenRPCServerState

    register()
    PopenRPCServerState(host, port, port + 100, tracker_addr=parse_address(tracker), key=key)
    threading.Event().wait()


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(serve)
    app(prog_name=program_name("schedules.measuring.remote_server"))
