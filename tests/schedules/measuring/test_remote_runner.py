"""Kernels of a few microseconds on two servers of a tracker on this machine: no other machine, no other port."""

# ruff: noqa: E402
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
pytest.importorskip("tornado")
from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.cpu.calibration import find_compiler
from costmodel.machines.machine_file import host_identity
from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.cpu_target import host_target, tiles_refused
from schedules.kernels.template_table import template_for
from schedules.measuring import remote_runner
from schedules.measuring.kernel_verification import unwritten_value
from schedules.measuring.remote_runner import RemoteRunner
from schedules.measuring.remote_server import parse_address, remote_facts
from tests.schedules.rpc_servers import KEY, running_servers

POINTWISE = Conv2d(1, 16, 6, 6, 16, (1, 1), epilogue=Epilogue(bias=True))


@pytest.fixture(scope="module")
def tracker() -> Iterator[str]:
    try:
        find_compiler()
    except MissingDependencyError:
        pytest.skip("there is no C compiler")
    with running_servers() as address:
        yield address


@pytest.fixture(scope="module")
def runner(tracker: str) -> Iterator[RemoteRunner]:
    with RemoteRunner(tracker, KEY, 1) as found:
        yield found


def test_servers_say_which_cpu_they_have(runner: RemoteRunner):
    """Read there, from files and flags; the servers are on this machine, so it is this CPU."""
    assert runner.servers == 2
    assert runner.cpu == host_target(1) and runner.host == host_identity()


def test_candidates_are_built_here_verified_and_timed_there(runner: RemoteRunner):
    template = template_for(POINTWISE, runner.cpu)
    assert template is not None
    configs = list(template.space(POINTWISE, runner.cpu)[:3])
    found = list(runner.measure_batch(POINTWISE, configs))
    assert sorted(map(str, (config for config, _ in found))) == sorted(map(str, configs))
    for _, outcome in found:
        assert outcome.ok, outcome
        assert outcome.seconds is not None and 0 < outcome.seconds < 1e-2 and outcome.samples >= 3
    assert all(outcome.ok for outcome in runner.compare([[(POINTWISE, config)] for config in configs]))
    assert [outcome.ok for outcome in runner.rehearse([()])] == [False]


def test_wrong_values_and_what_cannot_be_built_have_no_time(runner: RemoteRunner, monkeypatch):
    template = template_for(POINTWISE, runner.cpu)
    assert template is not None
    config = template.space(POINTWISE, runner.cpu)[0]

    def fail(*_: object) -> bytes:
        raise ValueError("no such register")

    monkeypatch.setattr(remote_runner, "kernel_library", fail)
    ((_, outcome),) = runner.measure_batch(POINTWISE, [config])
    assert (outcome.error, outcome.message) == ("build", "ValueError: no such register")
    monkeypatch.setattr(remote_runner, "kernel_library", lambda *_: b"not a library")
    ((_, outcome),) = runner.measure_batch(POINTWISE, [config])
    assert outcome.error == "crash" and "the server ended the session" in outcome.message
    monkeypatch.undo()
    case = runner._case(POINTWISE, template)
    case.expected[0, 3, 2, 1] += 1
    ((_, outcome),) = runner.measure_batch(POINTWISE, [config])
    case.expected[0, 3, 2, 1] -= 1
    assert outcome.error == "wrong" and "element (0, 3, 2, 1)" in outcome.message
    ((_, outcome),) = runner.measure_batch(POINTWISE, [config])
    assert outcome.ok


def test_weights_rotate_as_they_do_here(runner: RemoteRunner):
    """A copy of the constants has their values, and the calls go on with the next copy where the last sample ended."""
    template = template_for(POINTWISE, runner.cpu)
    assert template is not None
    server = runner._tracker.connect(30.0)
    case = runner._case(POINTWISE, template)
    rotation = remote_runner.remote_rotation(server, case, template, POINTWISE, runner.cpu)
    assert len(rotation) == remote_runner.rotation_copies(sum(t.numpy().nbytes for t in rotation[0][1:-1]), runner.cpu)
    for local, first, last in zip(case.rotation[0][1:-1], rotation[0][1:-1], rotation[-1][1:-1], strict=True):
        np.testing.assert_array_equal(last.numpy(), local.numpy())
        assert not first.same_as(last)
    assert rotation[0][0].same_as(rotation[-1][0]) and rotation[0][-1].same_as(rotation[-1][-1])


@pytest.mark.skipif(host_target(1).lacks("int8") is not None, reason=str(host_target(1).lacks("int8")))
def test_a_server_without_permission_for_tiles_is_a_cpu_without_them(runner: RemoteRunner, monkeypatch):
    """It runs on this machine, so that it is answered what this process is."""
    server = runner._tracker.connect(30.0)
    granted = server.may_use_tiles()
    assert granted == (tiles_refused() is None)
    text = "flags\t\t: lm avx2 fma amx_tile amx_bf16\n"
    monkeypatch.setattr(server, "read", lambda path: text if path == "/proc/cpuinfo" else "")
    for answer in (True, False):
        monkeypatch.setattr(server, "may_use_tiles", lambda answer=answer: answer)
        _, flags = remote_facts(server)
        assert ("amx_tile" in flags, "amx_bf16" in flags, "avx2" in flags) == (answer, answer, True)


def test_kernels_of_bytes_are_verified_there(runner: RemoteRunner):
    """There is no NaN of a byte that an element left out could be told by."""
    quantised = replace(POINTWISE, dtype="int8")
    template = template_for(quantised, runner.cpu)
    assert template is not None
    server = runner._tracker.connect(30.0)
    rotation = remote_runner.remote_rotation(server, runner._case(quantised, template), template, quantised, runner.cpu)
    assert (rotation[0][-1].numpy() == unwritten_value(np.dtype("uint8"))).all()
    ((_, outcome),) = runner.measure_batch(quantised, [template.space(quantised, runner.cpu)[0]])
    assert outcome.ok, outcome


def test_what_cannot_be_reached_is_one_line(tracker: str):
    for text in ("localhost", "localhost:", ":9190", "localhost:0", "localhost:x"):
        with pytest.raises(InputError, match="expected HOST:PORT"):
            parse_address(text)
    with pytest.raises(InputError, match=r"--tracker 127\.0\.0\.1:1: cannot be reached"):
        RemoteRunner("127.0.0.1:1", KEY)
    with pytest.raises(InputError, match="--key other: the tracker at .* has no such server"):
        RemoteRunner(tracker, "other")
    with pytest.raises(InputError, match="--threads 4096: a server of tiny may use"):
        RemoteRunner(tracker, KEY, 4096)
