"""Several ranks from a graph without prices to a prediction, with a toy cluster whose answers are mental arithmetic."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from drawn_graphs import Drawing, together

from costmodel.errors import InputError
from costmodel.interface import CostModel, Estimate
from costmodel.machine_catalog import load_machine
from e2e.collective_pricing import price_collectives
from e2e.graph import ExecutionGraph
from e2e.memory import MemoryUsage
from e2e.multi_rank import predict_ranks, run_ranks
from e2e.multi_rank_html import ranks_page, write_ranks_report
from e2e.multi_rank_prediction import multi_rank_record
from e2e.multi_rank_text import render_ranks
from e2e.prediction import Prediction
from e2e.predictor import Setting
from e2e.skew import Skew


@dataclass(frozen=True)
class ToyCluster:
    """Two GPUs and two network cards in each node."""

    name: str = "toy"
    gpus_per_node: int = 2
    nodes: int = 2
    node_gpus: int = 2
    network_cards: int = 2


class ToyCollectives(CostModel):
    """1 s per 100 bytes, twice as long between nodes; divided among those that share the links."""

    def __init__(self) -> None:
        self.asked: list = []

    def estimate(self, operators):
        self.asked += operators
        return [self._one(each) for each in operators]

    def _one(self, each):
        size = each.size_bytes if each.busiest_bytes is None else each.busiest_bytes
        seconds = size / 100 * (2 if each.nodes > 1 else 1) * each.sharing
        return Estimate(seconds, 0.9 * seconds, 1.1 * seconds, "network", {}, "fitted")


class Table:
    def seconds(self, kind, name):
        return 0.0


SETTING = Setting(load_machine("v100-pcie-32gb"), Table(), ToyCollectives())


def unpriced(graph: ExecutionGraph) -> ExecutionGraph:
    """Without the durations of collectives."""
    ranks = tuple(
        replace(rank, tasks=tuple(replace(t, duration=None) if t.collective else t for t in rank.tasks))
        for rank in graph.ranks
    )
    return replace(graph, ranks=ranks)


def predict(graph: ExecutionGraph, **options):
    return predict_ranks(unpriced(graph), SETTING, ToyCluster(), collectives=ToyCollectives(), **options)


def reduced(compute: tuple[float, ...], size: int = 400) -> ExecutionGraph:
    """Each rank computes for its time, then all reduce and the host waits for it."""
    drawings = [Drawing(rank) for rank in range(len(compute))]
    for drawing, seconds in zip(drawings, compute, strict=True):
        drawing.kernel("gemm", seconds, launch=0)
        drawing.event(0, 7, 20)
        drawing.collective("nccl", 0, 0, ranks=tuple(range(len(compute))), size=size, launch=0)
        drawing.synchronize(stream=20)
    return together(*drawings)


def test_transfer_is_apart_from_waiting_and_the_straggler_is_named():
    prediction = predict(reduced((10.0, 16.0)))
    assert prediction.iteration_seconds == pytest.approx(20)
    (collective,) = prediction.collectives
    assert collective.transfer_seconds == pytest.approx(4)
    assert collective.waiting_seconds == pytest.approx({0: 6, 1: 0})
    assert (collective.last_rank, collective.skew_seconds) == (1, pytest.approx(6))
    assert collective.start_seconds == pytest.approx(16) and collective.end_seconds == pytest.approx(20)
    (straggler,) = prediction.stragglers
    assert (straggler.rank, straggler.collectives, straggler.caused_seconds) == (1, 1, pytest.approx(6))


def test_large_steps_are_simulated_less_often_unless_they_settle_late(monkeypatch):
    """Late: rank 0 ends its iterations after 30, 40, 50 s, rank 1 after 20, 40, 60 s: periods of 30, 10, 20, 20 s."""
    chain, slow = Drawing(0), Drawing(1)
    for stream in (7, 8, 9):
        if stream > 7:
            chain.event(stream, stream - 1, stream)
        chain.kernel("part", 10, stream=stream, launch=0)
    slow.kernel("gemm", 20, launch=0)

    def run(graph, **options):
        done = run_ranks(unpriced(graph), SETTING, ToyCluster(), collectives=ToyCollectives(), **options)
        return done.timeline.iterations, done.iteration, done.prediction

    small = run(reduced((10.0, 16.0)))
    assert small[:2] == (6, 4)
    monkeypatch.setattr("e2e.multi_rank.MANY_TASKS", 4)
    large = run(reduced((10.0, 16.0)))
    assert large[:2] == (3, 1)
    assert large[2] == small[2]
    late = run(together(chain, slow))
    assert late[:2] == (6, 4) and late[2].iteration_seconds == pytest.approx(20)
    assert run(reduced((10.0, 16.0)), skew=Skew({1: 5.0}))[0] == 6


def test_attribution_sums_to_the_step_for_the_job_and_for_every_rank():
    prediction = predict(reduced((10.0, 16.0)))
    assert prediction.attribution == pytest.approx({"compute": 16, "collective transfer": 4})
    first, second = prediction.ranks
    assert first.attribution == pytest.approx({"compute": 10, "collective wait": 6, "collective transfer": 4})
    assert second.attribution == pytest.approx({"compute": 16, "collective transfer": 4})
    assert (first.exposed_transfer_seconds, first.exposed_wait_seconds) == pytest.approx((4, 6))
    assert (first.compute_seconds, first.communication_seconds, first.bubble_seconds) == pytest.approx((10, 10, 0))


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
    prediction = predict(together(*stages))
    assert prediction.iteration_seconds == pytest.approx(31)
    first, second = prediction.ranks
    assert second.bubble_seconds == pytest.approx(10)
    assert second.attribution == pytest.approx({"compute": 20, "bubble": 10, "collective transfer": 1})
    assert first.attribution == pytest.approx({"compute": 20, "collective transfer": 1, "collective wait": 10})
    assert sum(prediction.attribution.values()) == pytest.approx(31)


def test_the_interval_comes_from_what_is_on_the_critical_path():
    low, high = predict(reduced((10.0, 16.0))).interval_seconds
    # The kernels are measured; the transfer of 4 s is 10 % uncertain.
    assert (low, high) == pytest.approx((19.6, 20.4))


def test_host_time_on_the_path_is_as_uncertain_as_the_host_is_unknown():
    class Unknown:
        factor = 1.5

        def seconds(self, kind, name):
            return 1.0

    drawing = Drawing(0)
    for _ in range(4):
        drawing.host(1.0)
    graph = unpriced(together(drawing))
    setting = Setting(load_machine("a100-pcie-40gb"), Unknown(), ToyCollectives())
    prediction = predict_ranks(graph, setting, ToyCluster(), collectives=ToyCollectives())
    low, high = prediction.interval_seconds
    seconds = prediction.iteration_seconds
    assert seconds > 0 and (low, high) == pytest.approx((seconds / 1.5, seconds * 1.5))


def test_groups_are_priced_by_size_ranks_and_nodes():
    model = ToyCollectives()
    drawings = [Drawing(rank) for rank in range(4)]
    for drawing in drawings:
        first = drawing.rank // 2 * 2
        drawing.collective("pair", 0, 0, group=f"node {first}", ranks=(first, first + 1), size=100)
        drawing.collective("all", 0, 0, ranks=(0, 1, 2, 3), size=300)
    price_collectives(unpriced(together(*drawings)), ToyCluster(), model)
    asked = {(each.kind, each.size_bytes, each.ranks, each.nodes, each.sharing) for each in model.asked}
    assert asked == {("all_reduce", 100, 2, 1, 1), ("all_reduce", 300, 4, 2, 1)}


def test_folded_groups_share_the_network_of_their_node():
    """Rank 0 stands for 4: two groups of two, (0, 2) and (1, 3), each over both nodes, send at the same time."""
    model = ToyCollectives()
    drawing = Drawing(0)
    drawing.collective("data parallel", 0, 0, ranks=(0, 2), size=100)
    price_collectives(unpriced(together(drawing, multiplicity={0: 4})), ToyCluster(), model)
    (transfer,) = model.asked
    assert (transfer.ranks, transfer.nodes, transfer.sharing) == (2, 2, 2)


class Broken(ToyCollectives):
    """Half of the time on the network, a quarter on the GPU's port."""

    def _one(self, each):
        terms = {"analytic_seconds": 4.0, "gpu_link_seconds": 1.0, "network_seconds": 2.0}
        return Estimate(4.0, 4.0, 4.0, "network", terms, "fitted")


@pytest.mark.parametrize(("ranks", "span"), [((0, 1), 0), ((0, 2), 3), ((1, 2, 3), 0), ((0, 4), 0), ((0, 3, 4, 5), 4)])
def test_how_far_apart_ranks_are_within_a_node(ranks, span):
    model = ToyCollectives()
    drawings = [Drawing(rank) for rank in range(8)]
    for rank in ranks:
        drawings[rank].collective("nccl", 0, 0, ranks=ranks, size=400, launch=0)
    price_collectives(unpriced(together(*drawings)), ToyCluster(gpus_per_node=4, node_gpus=4), model)
    assert [each.span for each in model.asked] == [span]


def test_links_are_used_as_far_as_the_model_says():
    def links(ranks: tuple[int, ...], multiplicity: dict[int, int], kind: str = "all_reduce") -> dict[str, float]:
        drawing = Drawing(0)
        drawing.collective("nccl", 0, 0, ranks=ranks, kind=kind)
        graph = unpriced(together(drawing, multiplicity=multiplicity))
        return dict(price_collectives(graph, ToyCluster(), Broken()).ranks[0].tasks[0].links)

    def both(gpu: float, network: float) -> dict[str, float]:
        ways = {f"gpu 0 {way}": gpu for way in ("in", "out")}
        return ways | {f"network of node 0 {way}": network for way in ("in", "out") if network}

    assert links((0, 1), {0: 2}) == both(0.25, 0)
    # One GPU of each node reaches one of its two cards; its folded neighbour the other.
    assert links((0, 2), {0: 2}) == both(0.25, 0.25)
    assert links((0, 2), {0: 4}) == both(0.25, 0.5)
    assert links((0, 1, 2, 3), {0: 4}) == both(0.25, 0.5)
    # Both directions at once do not disturb each other.
    assert links((0, 1), {0: 2}, "send") == {"gpu 0 out": 0.25}
    assert links((0, 1), {0: 2}, "recv") == {"gpu 0 in": 0.25}


def test_an_uneven_all_to_all_takes_what_the_busiest_rank_takes():
    """Of its 300 bytes it keeps half."""
    drawings = [Drawing(rank) for rank in range(2)]
    for drawing, size in zip(drawings, (100, 300), strict=True):
        drawing.collective("nccl", 0, 0, kind="all_to_all", size=size, launch=0)
    (collective,) = predict(together(*drawings)).collectives
    assert collective.transfer_seconds == pytest.approx(1.5)


def test_a_group_of_one_moves_nothing():
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, ranks=(0,), size=10**9)
    graph = price_collectives(unpriced(together(drawing)), ToyCluster(), ToyCollectives())
    assert graph.ranks[0].tasks[0].duration.seconds == 0


def test_ranks_beyond_the_cluster_are_refused():
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, ranks=(0, 4))
    with pytest.raises(InputError, match="has rank 4, but toy has 4 GPUs"):
        price_collectives(unpriced(together(drawing)), ToyCluster(), ToyCollectives())


def test_an_unknown_collective_is_refused():
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, kind="gossip")
    with pytest.raises(InputError, match="gossip of group 'world': no such collective is priced; known: all_reduce"):
        price_collectives(unpriced(together(drawing, multiplicity={0: 2})), ToyCluster(), ToyCollectives())


def test_memory_is_given_per_rank():
    small, large = (MemoryUsage(size, {"parameters": size}, 0, "aten::mm") for size in (1 << 30, 64 << 30))
    prediction = predict(reduced((10.0, 16.0)), memory={0: small, 1: large})
    assert [rank.fits for rank in prediction.ranks] == [True, False]
    assert prediction.fits is False
    assert any("does not fit: rank 1 needs 64.0 GiB" in warning for warning in prediction.warnings)
    assert predict(reduced((10.0, 16.0)), memory={0: small}).fits is None


def test_the_record_is_json_and_the_timeline_is_there():
    graph = unpriced(reduced((10.0, 16.0)))
    result = run_ranks(graph, SETTING, ToyCluster(), collectives=ToyCollectives())
    record = json.loads(json.dumps(multi_rank_record(result.prediction)))
    assert record["ranks"][1]["attribution"]["compute"] == pytest.approx(16)
    assert record["collectives"][0]["skew_seconds"] == pytest.approx(6)
    assert result.timeline.task(0, 1, result.iteration).end > 0


def test_the_record_has_what_that_of_one_gpu_has():
    """The keys that programs read; of the rank that computes longest, memory of the fullest one."""
    memory = {rank: MemoryUsage(size, {"parameters": size}, 0, "aten::mm") for rank, size in enumerate((3, 2))}
    graph = unpriced(reduced((10.0, 16.0)))
    record = multi_rank_record(predict_ranks(graph, SETTING, ToyCluster(), memory, collectives=ToyCollectives()))
    known = {field.name for field in fields(Prediction)} - {"workload", "machine", "operators", "memory_breakdown"}
    assert known <= set(record)
    assert record["gpu_active_seconds"] + record["gpu_idle_seconds"] == pytest.approx(record["iteration_seconds"])
    assert sum(record["breakdown"]["by_kind"].values()) == pytest.approx(20) and record["peak_memory_bytes"] == 3


def test_reports_hold_the_figures(tmp_path, capsys):
    memory = {rank: MemoryUsage(2 << 30, {"parameters": 2 << 30}, 0, "aten::mm") for rank in (0, 1)}
    graph = replace(unpriced(reduced((10.0, 16.0))), source="toy <job>")
    prediction = predict_ranks(graph, SETTING, ToyCluster(), memory, collectives=ToyCollectives())
    render_ranks(prediction)
    printed = capsys.readouterr().out
    for piece in ("toy <job> on 2 x v100", "on 2 nodes", "20000.000 ms", "collective transfer", "all_reduce",
                  "straggler   rank 1 came last in 1 collectives; the next one waited 6000.000 ms",
                  "2.00 to 2.00 GiB"):  # fmt: skip
        assert piece in printed
    page = ranks_page(prediction)
    assert "toy &lt;job&gt;" in page and "<job>" not in page and "http" not in page
    assert "waiting for ranks: 6000.000 ms" in page
    write_ranks_report(prediction, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == page
