"""Recorded jobs of several ranks: read, paired, linked, replayed and moved to another GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Elementwise, Gemm
from e2e.price.recorded_kernels import Scaling, retarget
from e2e.simulate.simulator import simulate
from e2e.sources.prepared_step import run_step
from e2e.sources.recorded_job import prepare_recording
from e2e.sources.requests import Recording
from e2e.step.execution_graph import CallInfo, Duration, ExecutionGraph, Launch, RankGraph, Task
from e2e.traces.kineto import read_kineto
from e2e.traces.recorded_graph import recorded_graph
from e2e.traces.recorded_run import expand_files, machine_of_gpu, read_recorded_run
from e2e.traces.step_window import iterations
from lab.validate.recorded_jobs import replay, replay_public
from tests.e2e.recorded_traces import DATA, DLRM, DLRM_ET, LINEAR_ET, Profile, recorded


def profile(rank: int, begin: float, wait: float, world: int = 2) -> Profile:
    """An iteration from ``begin`` on: a kernel of 10, then an all-reduce that waits ``wait`` and takes 5."""
    made = Profile(distributedInfo={"rank": rank, "world_size": world}, deviceProperties=[{"name": "Tesla T4"}])
    made.host("user_annotation", "ProfilerStep#0", begin, 40)
    made.operator("aten::mm", begin, 10)
    made.launch(begin + 2, 3, begin + 5, 10)
    made.launch(begin + 12, 3, begin + 16, wait + 5, stream=9, name="ncclDevKernel_AllReduce")
    made.events[-1]["args"] |= {"Collective name": "allreduce", "In msg nelems": 8, "Group size": 2, "dtype": "Float"}
    return made


def written(tmp_path: Path, *profiles: Profile) -> list[Path]:
    return [made.write(tmp_path / f"rank{number}.json") for number, made in enumerate(profiles)]


def test_ranks_are_replayed_with_their_own_starts(tmp_path):
    """Rank 1 begins 7 later: rank 0 waits 7 in the collective."""
    run = read_recorded_run(written(tmp_path, profile(0, 0, 7), profile(1, 7, 0)))
    result = replay(run)
    assert [each.recorded_seconds for each in result.ranks] == pytest.approx([40e-6, 40e-6])
    (collective,) = result.collectives
    assert collective.transfer_seconds == pytest.approx(5e-6)
    # Its launch ends 1 us before it began to run, which the simulation does not know.
    assert collective.longest_wait_seconds == pytest.approx(7e-6)
    assert collective.end_error == pytest.approx(1 / 40)
    assert result.worst_rank < 1e-6 and result.step_error == pytest.approx(0, abs=1e-6)


def test_files_come_as_patterns_and_lists(tmp_path):
    first, second = written(tmp_path, profile(0, 0, 7), profile(1, 7, 0))
    assert expand_files([f"{tmp_path}/rank*.json"]) == [first, second]
    assert expand_files([second, first, f"{tmp_path}/rank?.json"]) == [second, first]
    with pytest.raises(InputError, match=r"none\*: no file fits"):
        expand_files([f"{tmp_path}/none*"])


def test_incomplete_jobs_are_refused_by_name(tmp_path):
    first, second = written(tmp_path, profile(0, 0, 7, world=3), profile(1, 7, 0, world=3))
    with pytest.raises(InputError, match=r"rank0\.json: the job has 3 ranks, but there is no profile of rank 2"):
        read_recorded_run([first, second])
    again = profile(0, 0, 7, world=3).write(tmp_path / "again.json")
    with pytest.raises(InputError, match=r"rank0\.json and .*again\.json are both of rank 0"):
        read_recorded_run([first, again])
    with pytest.raises(InputError, match="1 execution traces and 2 profiles"):
        read_recorded_run(written(tmp_path, profile(0, 0, 7), profile(1, 7, 0)), [recorded(LINEAR_ET)])


def test_work_from_before_the_recording_is_awaited_once(tmp_path):
    """The recording begins behind a backlog of kernels whose launches it lacks, in a call that awaits them all."""
    made = Profile(deviceProperties=[{"name": "Tesla T4"}])
    made.host("user_annotation", "ProfilerStep#0", 0, 200)
    for start in (0, 40, 80):  # launched before
        made.launch(start, 3, start, 39)
        made.events.pop(-2)
    made.runtime("cudaDeviceSynchronize", 5, 116)
    made.operator("aten::mm", 130, 20)
    made.launch(135, 5, 142, 50)
    step = recorded_graph(read_kineto(made.write(tmp_path / "late.json")))
    assert [task.duration.seconds for task in step.graph.ranks[0].tasks] == pytest.approx([50e-6])
    assert simulate(step.graph).step_seconds == pytest.approx(step.recorded_seconds, rel=0.02)


def test_the_gap_while_a_copy_is_staged_stays(tmp_path):
    """A pageable copy is held up by a kernel until 60, then the host copies into pinned memory until 200."""
    made = Profile(deviceProperties=[{"name": "Tesla T4"}])
    made.host("user_annotation", "ProfilerStep#0", 0, 260)
    made.operator("aten::mm", 0, 10)
    made.launch(2, 4, 10, 50)
    for start in (12, 16):
        made.launch(start, 3, start + 45, 1, call="cudaMemcpyAsync", category="gpu_memcpy", name="HtoD (Pinned)")
    copy = "Memcpy HtoD (Pageable -> Device)"
    made.launch(20, 222, 200, 40, call="cudaMemcpyAsync", category="gpu_memcpy", name=copy)
    step = recorded_graph(read_kineto(made.write(tmp_path / "copy.json")))
    assert simulate(step.graph).step_seconds == pytest.approx(step.recorded_seconds, rel=0.1)


def test_layers_are_no_steps(tmp_path):
    """Four marked layers of a forward pass, then a backward pass: the whole is the step."""
    made = Profile(deviceProperties=[{"name": "Tesla T4"}])
    for start in (0, 20, 40, 60):
        made.host("user_annotation", "layer", start, 15)
        made.operator("aten::mm", start + 1, 10)
        made.launch(start + 3, 3, start + 7, 5)
    made.operator("autograd::engine::evaluate_function: MmBackward0", 100, 100)
    made.launch(110, 3, 115, 80)
    (window,) = iterations(read_kineto(made.write(tmp_path / "layers.json")))
    assert window.name == "whole trace"


def test_the_recorded_time_stands_beside_the_replayed(tmp_path):
    (path,) = written(tmp_path, profile(0, 0, 7, 1))
    prepared = prepare_recording(Recording(str(path), gpu="t4"))
    assert any("recorded 0.040 ms, replayed 0.040 ms" in note for note in run_step(prepared).prediction.notes)
    off = run_step(replace(prepared, recorded_seconds=42e-6)).prediction
    assert any("replayed 0.040 ms (-4.8%): the replay is wrong" in line for line in off.warnings)


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100-PG509-200", "a100-sxm-40gb"),
        ("NVIDIA PG509-210", "a100-sxm-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("Tesla V100-DGXS-32GB", "v100-sxm2-32gb"),
        ("NVIDIA H100", None),  # one of two
        ("AMD Instinct MI300X", None),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-max-q"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-PG000-000", None),
        ("", None),
    ],
)
def test_the_machine_of_a_drivers_name(name: str, machine: str | None):
    found = machine_of_gpu(name)
    assert (found.name if found else None) == machine


# --- another GPU -----------------------------------------------------------------------------------


class Rate(CostModel):
    """A product takes 1 s / ``gemm``, an element-wise kernel 1 s / ``memory``."""

    def __init__(self, gemm: float, memory: float) -> None:
        self.gemm, self.memory = gemm, memory

    def estimate(self, operators):
        return [self._one(1 / (self.gemm if isinstance(each, Gemm) else self.memory)) for each in operators]

    @staticmethod
    def _one(seconds: float) -> Estimate:
        return Estimate(seconds, 0.5 * seconds, 2 * seconds, "compute", {}, "fitted")


def rank(tasks: list[Task], parents: dict[int, int | None]) -> RankGraph:
    calls = {call: CallInfo(call, f"call {call}", parent=parent) for call, parent in parents.items()}
    return RankGraph(0, {"main": tuple(Launch(task.id, Duration.measured(1.0)) for task in tasks)}, tuple(tasks), calls)


def test_kernels_are_scaled_by_their_operator_others_as_element_wise():
    product, relu = Gemm(1, 8, 8, 8), Elementwise("relu", 64)
    measured = [Task(number, "k", "kernel", 7, (), Duration.measured(8.0), None, call) for number, call in
                enumerate((10, 2, 3, 4, 4))]  # fmt: skip
    # Call 10 runs inside call 1; call 3 is unknown to lowering; of call 4 it knows another number of kernels.
    recorded_rank = rank(measured, {1: None, 10: 1, 2: None, 3: None, 4: None})
    known = [(1, (product,)), (2, (relu,)), (4, (product, relu))]
    lowered = rank(
        [Task(n, "k", "kernel", 0, records, None, None, call) for n, (call, records) in enumerate(known)], {}
    )
    scaling = Scaling(load_machine("t4"), Rate(1, 1), Rate(4, 2))
    result = retarget(ExecutionGraph((recorded_rank,)), {0: lowered}, scaling)
    durations = [task.duration for task in result.graph.ranks[0].tasks]
    # The last two: from 1 + 1 to 1/4 + 1/2.
    assert [duration.seconds for duration in durations] == pytest.approx([2, 4, 4, 3, 3])
    assert (durations[0].lower, durations[0].upper, durations[0].source) == (1, 4, "fitted")
    assert result.described_fraction == pytest.approx(0.8)
    # What the host does stays.
    assert result.graph.ranks[0].threads == recorded_rank.threads


def test_the_same_gpu_changes_nothing():
    tasks = [Task(0, "k", "kernel", 7, (), Duration.measured(8.0), None, 1)]
    lowered = rank([Task(0, "k", "kernel", 0, (Gemm(1, 8, 8, 8),), None, None, 1)], {})
    scaling = Scaling(load_machine("t4"), Rate(3, 5), Rate(3, 5))
    result = retarget(ExecutionGraph((rank(tasks, {1: None}),)), {0: lowered}, scaling)
    assert result.graph.ranks[0].tasks[0].duration.seconds == 8


# --- the public job of 8 ranks ---------------------------------------------------------------------


def test_real_dlrm_ranks_are_linked_and_replayed():
    recorded(DLRM), recorded(DLRM_ET)
    result = replay_public(DATA.parent)
    assert [each.rank for each in result.ranks] == list(range(8))
    for each in result.ranks:
        assert each.linked == (1633, 1633)
        assert abs(each.error) < 0.05
    kinds = [each.kind for each in result.collectives]
    assert kinds == ["all_to_all"] * 4 + ["all_reduce", "all_to_all", "all_reduce", "all_reduce"]
    for collective in result.collectives:
        assert collective.ranks == 8
        assert collective.end_error < 0.02
    # Kernels last up to 7.6 ms, nearly all of it waiting for the rank that comes last.
    first = result.collectives[0]
    assert first.transfer_seconds < 50e-6 and first.longest_wait_seconds > 7e-3
