"""From a graph to a prediction, of one rank and of several, with models whose answers are mental arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.machines.cluster import load_cluster, single_gpu
from e2e.explain.predictor import RecordedSite, explain_once, predict_graph
from e2e.lowering.lower_trace import lower_step
from e2e.report.tables import launches_text
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage
from e2e.step.options import StepOptions
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import GPU, predict_ranks, predict_step, reduced, setting, step

# --- one rank ------------------------------------------------------------------------------------


def test_a_device_bound_step_takes_the_sum_of_its_kernels():
    prediction = predict_step(step(), setting(kernel=1.0, host=1e-3)).prediction
    assert prediction.iteration_seconds == pytest.approx(4.0, rel=1e-2)
    assert prediction.forward_seconds == pytest.approx(2.0, rel=1e-2)
    assert prediction.backward_seconds == pytest.approx(1.0, rel=1e-2)
    assert prediction.optimizer_seconds == pytest.approx(1.0, rel=1e-2)
    assert prediction.gpu_active_seconds == pytest.approx(4.0, rel=1e-2)
    assert prediction.host_bound_fraction < 0.02
    assert prediction.kernels == 4 and prediction.coverage == {"fitted": 1.0}


def test_a_host_bound_step_takes_the_sum_of_its_overheads():
    """Per operator: T1, T2, T4, T3; each a second."""
    prediction = predict_step(step(), setting(kernel=1e-3, host=1.0)).prediction
    assert prediction.iteration_seconds == pytest.approx(16.0, rel=1e-2)
    assert prediction.overheads == pytest.approx({"T1": 4.0, "T2": 4.0, "T3": 4.0, "T4": 4.0})
    assert prediction.host_bound_fraction > 0.99
    replayed = predict_step(step(), setting(kernel=1e-3, host=1.0, cuda_graph=True)).prediction
    assert replayed.iteration_seconds == pytest.approx(1.0, rel=1e-2)
    assert launches_text(prediction) == "4 in 4 operator calls"
    assert launches_text(replayed) == "1 of a CUDA graph of 4, captured from 4 operator calls"


def test_an_unknown_operator_is_counted_and_named():
    (warning,) = predict_step(step(), setting(1.0, 1e-3)).prediction.warnings
    assert "1 launches of operators without a model" in warning and "mine::secret (1)" in warning


def test_one_gpu_without_collectives_asks_no_model_of_them(monkeypatch):
    """It is slow to import."""

    def refuse(cluster):
        raise AssertionError("asked")

    monkeypatch.setattr("e2e.explain.predictor._collective_model", refuse)
    assert predict_step(step(), setting(1.0, 1e-3)).prediction.iteration_seconds > 0


def test_a_gpu_without_links_is_predicted_by_itself():
    """Links are optional in its file; nothing is sent."""
    alone = replace(GPU, links=())
    chosen = replace(setting(kernel=1.0, host=1e-3), machine=alone)
    lowered = lower_step(step(), StepOptions(compile=chosen.compiled))
    prediction = predict_graph(lowered.graph, chosen, single_gpu(alone)).prediction
    assert (prediction.cluster, prediction.nodes, prediction.gpus) == (GPU.name, 1, 1)
    assert prediction.iteration_seconds == pytest.approx(4.0, rel=1e-2)


# --- several -------------------------------------------------------------------------------------


def test_transfer_is_apart_from_waiting_and_the_straggler_is_named():
    prediction = predict_ranks(reduced((10.0, 16.0))).prediction
    assert prediction.iteration_seconds == pytest.approx(20)
    (collective,) = prediction.collectives
    assert collective.transfer_seconds == pytest.approx(4)
    assert collective.waiting_seconds == pytest.approx({0: 6, 1: 0})
    assert (collective.last_rank, collective.skew_seconds) == (1, pytest.approx(6))
    assert collective.start_seconds == pytest.approx(16) and collective.end_seconds == pytest.approx(20)
    (straggler,) = prediction.stragglers
    assert (straggler.rank, straggler.collectives, straggler.caused_seconds) == (1, 1, pytest.approx(6))


def settling_late():
    """Rank 0 ends its iterations after 30, 40, 50 s, rank 1 after 20, 40, 60 s: periods of 30, 10, 20, 20 s."""
    chain, slow = Drawing(0), Drawing(1)
    for stream in (7, 8, 9):
        if stream > 7:
            chain.event(stream, stream - 1, stream)
        chain.kernel("part", 10, stream=stream, launch=0)
    slow.kernel("gemm", 20, launch=0)
    return together(chain, slow)


def test_large_steps_are_simulated_less_often_unless_they_settle_late(monkeypatch):
    def run(graph, **options):
        done = predict_ranks(graph, **options)
        return done.timeline.iterations, done.iteration, done.prediction

    small = run(reduced((10.0, 16.0)))
    assert small[:2] == (6, 4)
    monkeypatch.setattr("e2e.explain.predictor.MANY_TASKS", 4)
    large = run(reduced((10.0, 16.0)))
    assert large[:2] == (3, 1)
    assert large[2] == small[2]
    late = run(settling_late())
    assert late[:2] == (6, 4) and late[2].iteration_seconds == pytest.approx(20)


def test_iterations_that_differ_are_told_of_by_how_much(monkeypatch):
    """Periods of 30, 10, 20 s, as above: after three of them the last two differ by half of the longer."""
    monkeypatch.setattr("e2e.explain.predictor.ITERATIONS", 3)
    warnings = predict_ranks(settling_late()).prediction.warnings
    assert any("not settled after 3 iterations: the last ones differ by 50.0%" in each for each in warnings)
    monkeypatch.setattr("e2e.explain.predictor.WORTH_TELLING", 0.5)
    assert not any("settled" in each for each in predict_ranks(settling_late()).prediction.warnings)


def test_a_pipeline_has_bubbles():
    """Two stages, two micro-batches, forward only: 10 s each, 1 s per transfer; stage 1 waits 11 s for its first."""
    stages = [Drawing(0), Drawing(1)]
    for batch in range(2):
        stages[0].kernel("forward", 10, launch=0)
        stages[0].event(batch, 7, 20)
        stages[0].collective("send", 0, batch, kind="send", size=100, launch=0)
        stages[1].collective("recv", 0, batch, kind="recv", size=100, launch=0)
        stages[1].event(batch, 20, 7)
        stages[1].kernel("forward", 10, launch=0)
    # Both ends of the step wait for each other: no iteration overlaps the next one.
    for stage in stages:
        stage.synchronize()
        stage.collective("barrier", 0, 0, kind="barrier", group="all", size=0, stream=30, launch=0)
        stage.synchronize()
    prediction = predict_ranks(together(*stages)).prediction
    assert prediction.iteration_seconds == pytest.approx(31)
    first, second = prediction.ranks
    assert second.bubble_seconds == pytest.approx(10)
    assert second.attribution == pytest.approx({"compute": 20, "bubble": 10, "collective transfer": 1})
    assert first.attribution == pytest.approx({"compute": 20, "collective transfer": 1, "collective wait": 10})
    assert sum(prediction.attribution.values()) == pytest.approx(31)


def test_what_is_short_by_less_than_the_estimate_errs_is_a_warning():
    near = MemoryUsage(32 << 30, {"parameters": 32 << 30}, 0, "aten::mm")
    prediction = predict_ranks(reduced((10.0, 16.0)), memory={0: near, 1: near}).prediction
    assert prediction.fits is None and prediction.memory_shortage is None
    (warning,) = [each for each in prediction.warnings if "may not fit" in each]
    assert "rank 0 needs 32.0 GiB" in warning and "more than there is" in warning


@pytest.mark.parametrize(("reserve", "told"), [(5, 0), (11, 1)])
def test_a_reserve_that_fills_the_gpu_is_told(reserve: int, told: int):
    """Of 31.3 GiB for tensors; 20 of them are in use."""
    usage = MemoryUsage((20 + reserve) << 30, {"parameters": 20 << 30, "reserve": reserve << 30}, 0, "aten::mm")
    prediction = predict_ranks(reduced((10.0, 16.0)), memory={0: usage, 1: usage}).prediction
    assert prediction.fits and prediction.memory_shortage is None
    assert sum("reserve fills the GPU" in each for each in prediction.warnings) == told


def test_one_gpu_that_is_full_names_the_operator():
    drawing = Drawing()
    drawing.kernel("gemm", 1.0)
    memory = {0: MemoryUsage(64 << 30, {"parameters": 64 << 30}, 3, "aten::addmm")}
    prediction = predict_ranks(together(drawing), memory=memory).prediction
    assert prediction.memory_shortage == (
        "does not fit: 64.0 GiB needed at aten::addmm, v100-pcie-32gb has 31.3 GiB for tensors: 104% more than there is"
    )


# --- recorded ------------------------------------------------------------------------------------


def test_a_recorded_step_is_explained_from_its_standing_start():
    """Rank 1 begins 5 s late and computes 16 s; the transfer is drawn with 4 s."""
    drawings = [Drawing(rank) for rank in range(2)]
    for drawing, seconds in zip(drawings, (10.0, 16.0), strict=True):
        drawing.kernel("gemm", seconds, launch=0)
        drawing.event(0, 7, 20)
        drawing.collective("nccl", 4.0, 0, launch=0)
    result = explain_once(together(*drawings), GPU, RecordedSite("as recorded"), starts={1: 5.0}, notes=["as recorded"])
    prediction = result.prediction
    assert (result.iteration, result.timeline.iterations, prediction.notes) == (0, 1, ("as recorded",))
    assert prediction.iteration_seconds == prediction.critical_path_seconds == pytest.approx(25)
    assert (prediction.cluster, prediction.nodes, prediction.gpus) == ("as recorded", 1, 2)
    assert prediction.ranks[0].exposed_wait_seconds == pytest.approx(11)
    assert prediction.interval_seconds == pytest.approx((25, 25))


@pytest.mark.parametrize(
    ("asked", "unsure"), [(("h100-sxm", 16), True), (("h100-sxm", 16, 2, "infiniband-ndr"), False),
                          (("dgx-h100", 16), False), (("h100-sxm", 8), False)],
)  # fmt: skip
def test_the_interval_takes_a_slower_network_where_nobody_names_it(asked, unsure: bool):
    """Sums between nodes, which nothing hides, take more than twice as long over a quarter of the network."""
    cluster = load_cluster(*asked)
    drawing = Drawing(0)
    drawing.kernel("gemm", 1.0)
    drawing.collective("nccl", 0, 0, ranks=tuple(range(cluster.gpus)), size=100 << 30, launch=0, stream=7)
    (rank,) = together(drawing, multiplicity={0: cluster.gpus}).ranks
    tasks = tuple(replace(task, duration=None) if task.collective else task for task in rank.tasks)
    graph = ExecutionGraph((replace(rank, tasks=tasks),), {0: cluster.gpus})
    prediction = predict_graph(graph, replace(setting(1.0, 1e-6), machine=cluster.machine), cluster).prediction
    lower, upper = prediction.interval_seconds
    sums = prediction.iteration_seconds - 1.0
    assert sums > 0.4
    assert (upper - prediction.iteration_seconds > sums) is unsure
    assert lower > prediction.iteration_seconds - sums
    assert bool([note for note in prediction.notes if "network between nodes" in note]) is unsure
