"""Where one iteration of a profile begins and ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from recorded_traces import LINEAR, RESNET_A100, RESNET_V100, Profile, recorded

from costmodel.base.errors import InputError
from e2e.traces.formats.kineto import read_kineto
from e2e.traces.linking.step_window import iterations
from e2e.traces.recorded_graph import recorded_graph

US = 1e-6


def us(seconds: float) -> float:
    return round(seconds / US, 6)


def steps(count: int) -> Profile:
    profile = Profile()
    for i in range(count):
        profile.host("user_annotation", f"ProfilerStep#{i}", 100 * i, 90)
        profile.operator("aten::mm", 100 * i + 5, 10 + i)
        profile.launch(100 * i + 7, 2, 100 * i + 9, 30)
    return profile


def test_one_iteration_is_chosen(tmp_path: Path) -> None:
    kineto = read_kineto(steps(4).write(tmp_path / "k.json"))
    assert [us(window.seconds) for window in iterations(kineto)] == [100, 100, 100, 90]
    assert recorded_graph(kineto, step=2).window.name == "ProfilerStep#2"
    assert recorded_graph(kineto, step=-1).window.name == "ProfilerStep#3"
    assert recorded_graph(kineto, step="ProfilerStep#1").device_events == 1
    with pytest.raises(InputError, match="no iteration 4; it has 4: ProfilerStep#0"):
        recorded_graph(kineto, step=4)
    with pytest.raises(InputError, match="no annotation 'nothing'"):
        recorded_graph(kineto, step="nothing")


def test_repetition_stands_for_step_annotations(tmp_path: Path) -> None:
    profile = Profile()
    for i in range(5):
        for j, name in enumerate(("aten::zero_", "aten::mm", "aten::mm", "aten::add_")):
            profile.operator(name, 100 * i + 20 * j, 10)
        profile.launch(100 * i + 22, 2, 100 * i + 30, 5)
    found = iterations(read_kineto(profile.write(tmp_path / "k.json")))
    assert [us(window.start) for window in found] == [0, 100, 200, 300, 400]


@pytest.mark.parametrize(("name", "count"), [(LINEAR, 40), (RESNET_V100, 5), (RESNET_A100, 3)])
def test_real_iterations(name: str, count: int) -> None:
    """The first is found by repetition, the others by the profiler's steps; windows follow without a gap."""
    found = iterations(read_kineto(recorded(name)))
    assert len(found) == count
    assert [window.end for window in found[:-1]] == [window.start for window in found[1:]]
