"""Kernels of a few microseconds on two servers of a tracker on this machine: no other machine, no other port."""

# ruff: noqa: E402
from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

tvm = pytest.importorskip("tvm")
pytest.importorskip("tornado")
from costmodel.base.errors import InputError, TuningError
from costmodel.machines.machine_file import host_identity
from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.cpu_target import host_target
from schedules.kernels.template_table import template_for
from schedules.measuring import remote_server
from schedules.measuring.remote_runner import RemoteRunner
from tests.schedules.rpc_servers import KEY, running_servers

POINTWISE = Conv2d(1, 16, 6, 6, 16, (1, 1), epilogue=Epilogue(bias=True))


@pytest.fixture(scope="module")
def tracker() -> Iterator[str]:
    with running_servers() as address:
        yield address


def test_candidates_are_built_verified_and_timed_on_servers(tracker: str):
    with pytest.raises(InputError, match="--key other: the tracker at .* has no such server"):
        RemoteRunner(tracker, "other")
    with RemoteRunner(tracker, KEY, 1) as runner:
        assert runner.servers == 2
        assert runner.cpu == host_target(1) and runner.host == host_identity()  # the servers are on this machine
        template = template_for(POINTWISE, runner.cpu)
        assert template is not None
        configs = list(template.space(POINTWISE, runner.cpu)[:2])
        found = list(runner.measure_batch(POINTWISE, [*configs, {"no": 1}]))
        assert sorted(str(config) for config, _ in found) == sorted(map(str, [*configs, {"no": 1}]))
        for config, outcome in found:
            if config == {"no": 1}:
                assert outcome.error == "build"
                continue
            assert outcome.ok, outcome
            assert outcome.seconds is not None and 0 < outcome.seconds < 1e-2 and outcome.samples >= 3
        assert all(outcome.ok for outcome in runner.compare([[(POINTWISE, config)] for config in configs[:2]]))
        assert [outcome.ok for outcome in runner.rehearse([()])] == [False]


class Session:
    """Answers as a server would, or not at all."""

    def __init__(self, lost: bool) -> None:
        self.lost = lost

    def get_function(self, name: str):
        def measure(request: str) -> bytes:
            if self.lost:
                raise RuntimeError("connection reset")
            arms = json.loads(request)["arms"]
            outcome = {"seconds": 1e-3, "step_seconds": []}
            return json.dumps({"answer": [outcome for _ in arms]}).encode()

        return measure


@pytest.mark.parametrize("lost", [(True, False), (True, True)])
def test_the_candidates_of_a_lost_server_are_measured_by_the_others(lost: tuple[bool, ...]):
    runner = RemoteRunner.__new__(RemoteRunner)
    runner._place, runner._sessions = "--key tiny: a server", [Session(each) for each in lost]
    configs = [{"knob": index} for index in range(10)]
    if all(lost):
        with pytest.raises(TuningError, match=r"gives no answer .*; start .* records are kept"):
            list(runner.measure_batch(POINTWISE, configs))
        return
    found = list(runner.measure_batch(POINTWISE, configs))
    assert sorted(config["knob"] for config, _ in found) == list(range(10)) and all(each.ok for _, each in found)


def test_errors_of_a_request_are_one_line(monkeypatch):
    for text in ("localhost", "localhost:", ":9190", "localhost:0", "localhost:x"):
        with pytest.raises(InputError, match="expected HOST:PORT"):
            remote_server.parse_address(text)
    with pytest.raises(InputError, match=r"--tracker 127\.0\.0\.1:1: cannot be reached"):
        RemoteRunner("127.0.0.1:1", KEY)
    answer = json.loads(bytes(remote_server._answer(remote_server.describe, '{"threads": 4096}')))
    assert "--threads 4096: this process may use" in answer["error"]
