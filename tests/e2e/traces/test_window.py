"""Where one iteration of a profile begins and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.sources.recorded_job import prepare_recording
from e2e.sources.requests import Recording
from e2e.traces.kineto import read_kineto
from e2e.traces.recorded_graph import recorded_graph
from e2e.traces.step_window import choose_step, doubts, iterations
from tests.e2e.recorded_traces import Profile

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


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op", "Operator"])
def test_steps_are_found_whatever_the_profiler_calls_their_marks(category: str, tmp_path: Path) -> None:
    profile = steps(4)
    for event in profile.events:
        if event["name"].startswith("ProfilerStep#"):
            event["cat"] = category
    kineto = read_kineto(profile.write(tmp_path / "k.json"))
    assert [window.name for window in iterations(kineto)] == [f"ProfilerStep#{i}" for i in range(4)]
    assert doubts(kineto, choose_step(kineto)) == []


def test_a_step_that_launched_nothing_is_not_taken(tmp_path: Path) -> None:
    profile = steps(2)
    profile.host("user_annotation", "ProfilerStep#2", 200, 90)
    profile.operator("aten::mm", 205, 10)
    assert recorded_graph(read_kineto(profile.write(tmp_path / "k.json"))).window.name == "ProfilerStep#1"


def test_what_may_be_no_steady_step_is_said(tmp_path: Path) -> None:
    layers = Profile()
    for i in range(36):
        for j in range(4):
            layers.operator(f"layer::{j}", 100 * i + 20 * j, 10)
        layers.launch(100 * i + 22, 2, 100 * i + 30, 5)
    kineto = read_kineto(layers.write(tmp_path / "layers.json"))
    (line,) = doubts(kineto, choose_step(kineto))
    assert "'layer::0', which repeats 36 times (0.1 of 3.6 ms)" in line
    whole = Profile()
    whole.operator("aten::to", 0, 900)
    whole.launch(905, 5, 920, 10)
    kineto = read_kineto(whole.write(tmp_path / "whole.json"))
    (line,) = doubts(kineto, choose_step(kineto))
    assert "nothing repeats: all that was recorded, from the first event to the last, is taken for one step" in line
    first = steps(3)
    first.runtime("cudaStreamBeginCapture", 101, 1)
    first.runtime("cudaMalloc", 110, 60)
    kineto = read_kineto(first.write(tmp_path / "first.json"))
    captured, loading = doubts(kineto, iterations(kineto)[1])
    assert "CUDA graph is captured" in captured and "60% of the recorded step load kernels" in loading


def asked(profile: Profile, path: Path, gpu: str | None) -> Recording:
    return Recording(str(profile.write(path)), gpu=gpu)


def test_a_run_of_an_unknown_gpu_is_not_told_to_be_of_the_one_asked_for(tmp_path: Path) -> None:
    profile = steps(3)
    profile._header["deviceProperties"] = [{"id": 0, "name": "AMD Instinct MI300X"}]
    step = prepare_recording(asked(profile, tmp_path / "k.json", "a100-sxm-80gb"))
    assert "kernels and transfers are as recorded on AMD Instinct MI300X" in step.notes
    assert any("--gpu a100-sxm-80gb: the recorded GPU (AMD Instinct MI300X)" in line for line in step.warnings)


def test_a_profile_without_device_work_is_refused_for_that(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("aten::mm", 5, 10)
    with pytest.raises(InputError, match="no work of a GPU in it"):
        prepare_recording(asked(profile, tmp_path / "k.json", None))
