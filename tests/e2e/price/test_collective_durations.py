"""What a collective becomes for the model of transfers, and what its task takes from the model's answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from e2e.price.collective_pricing import price_collectives
from e2e.step.execution_graph import Duration, ExecutionGraph, GpuLoad, Task
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import ToyCluster, ToyCollectives, unpriced


class Answer(CostModel):
    """One answer to all; remembers what it was asked."""

    def __init__(self, *figures: float, breakdown: dict | None = None) -> None:
        self.answer = Estimate(*(figures or (4.0, 3.0, 6.0)), "network", breakdown or {}, "fitted")
        self.asked: list = []

    def estimate(self, operators):
        self.asked += operators
        return [self.answer] * len(operators)


def drawn(ranks: int = 2, **collective) -> ExecutionGraph:
    drawings = [Drawing(rank) for rank in range(ranks)]
    for drawing in drawings:
        drawing.collective("nccl", 0, 0, ranks=tuple(range(ranks)), **collective)
    return unpriced(together(*drawings))


def with_collective(graph: ExecutionGraph, place: int, **fields) -> ExecutionGraph:
    """``graph`` with the collective of its rank at ``place`` changed."""
    rank = graph.ranks[place]
    first, *others = rank.tasks
    changed = replace(rank, tasks=(replace(first, collective=replace(first.collective, **fields)), *others))
    return replace(graph, ranks=(*graph.ranks[:place], changed, *graph.ranks[place + 1 :]))


def priced(graph: ExecutionGraph, model: CostModel, cluster=None, **options) -> list[Task]:
    found = price_collectives(graph, cluster or ToyCluster(), model, **options)
    return [rank.tasks[0] for rank in found.ranks]


# --- what is asked ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "busiest"),
    [
        ({"size_bytes": 100}, {"size_bytes": 300}, 150.0),  # the half that a rank keeps does not move
        ({"size_bytes": 100}, {"size_bytes": 100, "received_bytes": 500}, 250.0),
        ({"size_bytes": 100, "received_bytes": 40}, {"size_bytes": 100}, 50.0),
        ({"size_bytes": 100}, {"size_bytes": 100}, None),
    ],
)
def test_an_uneven_all_to_all_is_that_of_its_busiest_rank(first, second, busiest):
    model = Answer()
    graph = drawn(2, kind="all_to_all")
    priced(with_collective(with_collective(graph, 0, **first), 1, **second), model)
    assert [each.busiest_bytes for each in model.asked] == [busiest]


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_messages_are_transfers_between_two(kind):
    model = Answer()
    drawing = Drawing(1)
    drawing.collective("nccl", 0, 0, ranks=(0, 1), kind=kind, size=64)
    price_collectives(unpriced(together(drawing)), ToyCluster(), model)
    assert [(each.kind, each.ranks, each.nodes, each.size_bytes) for each in model.asked] == [("send_recv", 2, 1, 64)]


@pytest.mark.parametrize(
    ("ranks", "stands_for", "sharing"),
    [
        ((0, 4), 8, 4),  # of the 8 GPUs of two nodes each pair has one in each
        ((0, 4), 2, 1),
        ((0, 4), 3, 1),  # whole pairs alone
        ((0, 4), 6, 3),
        ((0, 4), 16, 4),  # more pairs than that are on other nodes
        ((0, 1), 8, 1),  # within a node nothing goes over the network
        ((0, 1, 4, 5), 8, 2),
    ],
)
def test_groups_folded_into_one_share_the_network(ranks, stands_for, sharing):
    model = Answer()
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, ranks=ranks, size=64)
    cluster = ToyCluster(gpus_per_node=4, node_gpus=4)
    price_collectives(unpriced(together(drawing, multiplicity={0: stands_for})), cluster, model)
    assert [each.sharing for each in model.asked] == [sharing]


# --- what comes of it ------------------------------------------------------------------------------


def test_a_task_takes_the_interval_the_bound_and_the_source_of_its_transfer():
    for task in priced(drawn(), Answer(4.0, 3.0, 6.0)):
        assert task.duration == Duration(4.0, 3.0, 6.0, "network", "fitted")
    for task in priced(with_collective(drawn(), 0, pieces=2), Answer(4.0, 3.0, 6.0))[:1]:
        assert task.duration == Duration(2.0, 1.5, 3.0, "network", "fitted")


def test_a_collective_of_one_takes_nothing_and_uses_no_link():
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, ranks=(0,))
    model = Answer()
    (task,) = priced(unpriced(together(drawing)), model, load=lambda transfer, seconds: GpuLoad(1.0))
    assert task.duration == Duration(0.0, 0.0, 0.0, "", "analytic")
    assert (task.links, task.load, model.asked) == ((), None, [])


@pytest.mark.parametrize(
    ("breakdown", "share"),
    [
        ({"gpu_link_seconds": 1.0}, 0.25),  # of the 4 s of the whole
        ({"gpu_link_seconds": 1.0, "analytic_seconds": 2.0}, 0.5),  # which a fit may have moved
        ({"gpu_link_seconds": 3.0, "analytic_seconds": 2.0}, 1.0),
        ({"gpu_link_seconds": 1.0, "analytic_seconds": 0.0}, 1.0),
        ({"gpu_link_seconds": 1.0, "analytic_seconds": 0.5}, 1.0),
        ({"gpu_link_seconds": "unknown"}, 1.0),
        ({"gpu_link_seconds": 1.0, "analytic_seconds": "unknown"}, 1.0),
        ({}, 1.0),
    ],
)
def test_a_link_is_taken_for_the_share_of_the_time_that_its_bytes_need(breakdown, share):
    for rank, task in enumerate(priced(drawn(), Answer(breakdown=breakdown))):
        assert dict(task.links) == {f"gpu {rank} out": share, f"gpu {rank} in": share}


def test_ranks_of_other_nodes_use_the_network_of_theirs():
    """8 ranks on 2 nodes of 4 GPUs and 8 cards each: every GPU reaches 2 cards, so 4 ranks reach all of them."""
    cluster = ToyCluster(gpus_per_node=4, node_gpus=4, network_cards=8)
    terms = {"gpu_link_seconds": 1.0, "network_seconds": 2.0}
    links = [dict(task.links) for task in priced(drawn(8), Answer(breakdown=terms), cluster)]
    assert [link["network of node 0 out"] for link in links[:4]] == [0.5] * 4
    assert [link["network of node 1 in"] for link in links[4:]] == [0.5] * 4
    drawing = Drawing(5)
    drawing.collective("nccl", 0, 0, ranks=(1, 5))
    (task,) = priced(unpriced(together(drawing)), Answer(breakdown=terms), cluster)
    assert dict(task.links)["network of node 1 out"] == 0.5 * 2 / 8


# --- what is refused -------------------------------------------------------------------------------


def test_the_last_rank_of_a_cluster_is_one_of_it():
    assert len(priced(drawn(4), ToyCollectives())) == 4
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, ranks=(0, 4), group="dp")
    message = "all_reduce of group 'dp' has rank 4, but toy has 4 GPUs; give --gpus and --nodes of the whole job"
    with pytest.raises(InputError) as caught:
        price_collectives(unpriced(together(drawing)), ToyCluster(), ToyCollectives())
    assert str(caught.value) == message
