"""Execution traces linked with profiles: each way of linking, and pairs that do not belong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.traces.kineto import KinetoTrace, read_kineto
from e2e.traces.linked_trace import link
from tests.e2e.recorded_traces import AUTOGRAD, MAIN, Profile

NAMES = ("aten::linear", "aten::addmm", "aten::relu", "aten::relu")


def trace(pid: int | None = MAIN, device: str = "cuda:0", shape: tuple[int, ...] = (2, 3)) -> OperatorTrace:
    inputs = (Tensor(1, 1, shape, "float32", device),)
    calls = [
        OperatorCall(10 + i, name, 10 if i == 1 else None, 0, inputs, attributes={"rf_id": 100 + i})
        for i, name in enumerate(NAMES)
    ]
    calls.append(OperatorCall(20, "ReluBackward0", None, 1, inputs, attributes={"rf_id": 120}))
    return OperatorTrace(tuple(calls), source="et.json", pid=pid)


def profile(tmp_path: Path, iterations: int = 1, number: str = "External id", shift: int = 0) -> KinetoTrace:
    """Every iteration takes 1,000 us; addmm (and linear around it) launches, the last one ReLU launches twice."""
    built = Profile()
    for step in range(iterations):
        start, ids = 1000 * step, {"External id": 0}
        for i, (name, at, seconds) in enumerate(zip(NAMES, (0, 10, 100, 200), (80, 60, 50, 50), strict=True)):
            ids = {"External id": 0, number: 100 + i + shift + 50 * step}
            built.operator(name, start + at, seconds, **ids, **{"Input Dims": [[2, 3]]})
        built.operator("ReluBackward0", start + 300, 50, AUTOGRAD, **{**ids, number: 120 + shift + 50 * step})
        built.launch(start + 20, 5, start + 30, 10)
        built.launch(start + 210, 5, start + 220, 1)
        built.launch(start + 220, 5, start + 230, 1)
        built.launch(start + 310, 5, start + 330, 1, thread=AUTOGRAD)
    return read_kineto(built.write(tmp_path / "k.json"))


@pytest.mark.parametrize(
    ("number", "shift", "method"),
    [
        ("Record function id", 0, "function id"),
        ("Record function id", 7, "function id"),
        ("External id", 3, "external id"),
        ("Ev Idx", 0, "order on each thread"),
    ],
)
def test_each_way_gives_the_same_links(tmp_path: Path, number: str, shift: int, method: str) -> None:
    linked = link(trace(), profile(tmp_path, number=number, shift=shift))
    assert linked.method == method
    assert linked.linked_operators == linked.total_operators == 5
    names = {span.id: span.name for span in linked.kineto.operators}
    assert [names[linked.spans[call.id]] for call in linked.trace.calls] == [*NAMES, "ReluBackward0"]
    launched = {call: len(spans) for call, spans in linked.device.items()}
    assert launched == {11: 1, 13: 2, 20: 1}
    assert (linked.linked_device, linked.total_device) == (4, 4)
    assert "5 of 5 operators and 4 of 4 device events" in linked.describe()


def test_ids_choose_the_iteration(tmp_path: Path) -> None:
    """Three iterations alike; the trace is of the second: names alone could not tell."""
    linked = link(trace(), profile(tmp_path, iterations=3, shift=-50))
    starts = {span.id: span.start for span in linked.kineto.operators}
    assert linked.method == "external id"
    assert min(starts[span] for span in linked.spans.values()) == pytest.approx(1000e-6)


def test_by_order_threads_are_of_one_iteration(tmp_path: Path) -> None:
    linked = link(trace(), profile(tmp_path, iterations=3, number="Ev Idx"))
    starts = [next(s.start for s in linked.kineto.operators if s.id == span) for span in linked.spans.values()]
    assert max(starts) - min(starts) < 1000e-6


def test_a_few_operators_may_be_missing_when_order_links(tmp_path: Path) -> None:
    whole = trace()
    calls = tuple(replace(call, id=call.id + 100 * i) for i in range(10) for call in whole.calls)
    kineto = profile(tmp_path, iterations=10, number="Ev Idx")
    # Without the last ReLU of the last iteration.
    kineto = replace(kineto, operators=tuple(s for i, s in enumerate(kineto.operators) if i != 48))
    linked = link(replace(whole, calls=calls), kineto)
    assert (linked.linked_operators, linked.total_operators) == (49, 50)


def test_pairs_that_do_not_belong_together(tmp_path: Path) -> None:
    kineto = profile(tmp_path)
    with pytest.raises(InputError, match=r"et\.json and .*k\.json do not belong together: process 7 and process 100"):
        link(trace(pid=7), kineto)
    with pytest.raises(InputError, match="cuda:1 and cuda:0; give two files of one rank"):
        link(trace(device="cuda:1"), kineto)
    with pytest.raises(InputError, match=r"5 of 5 shapes differ \(aten::linear has \[9, 9\] in the one and \[2, 3\]"):
        link(trace(shape=(9, 9)), replace(kineto, operators=kineto.operators[:4] + (with_shape(kineto),)))
    other = replace(trace(), calls=tuple(replace(call, name=f"other::{call.name}") for call in trace().calls))
    with pytest.raises(InputError, match=r"only 0 of 5 operators .*the profile lacks other::aten::relu \(2 more\)"):
        link(other, kineto)


def with_shape(kineto: KinetoTrace) -> object:
    return replace(kineto.operators[4], shapes=([2, 3],))
