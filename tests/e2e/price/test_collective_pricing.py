"""Durations and links of collectives, by a toy model of transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.base.errors import InputError
from costmodel.cost_model import Estimate
from e2e.price.collective_pricing import price_collectives
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import ToyCluster, ToyCollectives, unpriced


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


def test_an_unknown_collective_is_refused():
    drawing = Drawing(0)
    drawing.collective("nccl", 0, 0, kind="gossip")
    with pytest.raises(InputError, match="gossip of group 'world': no such collective is priced; known: all_reduce"):
        price_collectives(unpriced(together(drawing, multiplicity={0: 2})), ToyCluster(), ToyCollectives())


def test_pieces_together_take_as_long_as_the_whole():
    model = ToyCollectives()
    drawing = Drawing(0)
    drawing.collective("whole", 0, 0, ranks=(0, 1), size=400)
    drawing.collective("piece", 0, 1, ranks=(0, 1), size=100)
    graph = unpriced(together(drawing, multiplicity={0: 2}))
    whole, piece = graph.ranks[0].tasks
    piece = replace(piece, collective=replace(piece.collective, pieces=4))
    graph = replace(graph, ranks=(replace(graph.ranks[0], tasks=(whole, piece)),))
    durations = [task.duration for task in price_collectives(graph, ToyCluster(), model).ranks[0].tasks]
    assert durations[1].seconds == durations[0].seconds / 4 > 0
    assert {each.size_bytes for each in model.asked} == {400}
