"""Alike ranks folded into one must take as long as all of them simulated."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.collectives import CollectiveModel
from costmodel.machines.cluster import load_cluster
from e2e.price.collective_pricing import price_collectives
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import ExecutionGraph
from tests.e2e.drawn_graphs import Drawing, together


def program(drawing: Drawing, seed: int, groups: dict[str, tuple[int, ...]], steps: int = 30) -> None:
    """The same random actions for every rank: kernels, side streams, waits, collectives of its groups."""
    source = random.Random(seed)
    sequence = dict.fromkeys(groups, 0)
    events = iter(range(10**6))
    for _ in range(steps):
        choice = source.choice(["host", "kernel", "kernel", "collective", "event", "synchronize"])
        stream = source.choice([7, 20, 21])
        seconds = source.uniform(0.1, 5.0)
        if choice == "host":
            drawing.host(seconds)
        elif choice == "kernel":
            drawing.kernel("k", seconds, stream=stream)
        elif choice == "event":
            drawing.event(next(events), stream, source.choice([7, 20, 21]))
        elif choice == "synchronize":
            drawing.synchronize(stream=stream)
        else:
            name = source.choice(sorted(groups))
            ranks = groups[name]
            size = source.choice([1 << 20, 1 << 24])
            group = f"{name} {min(ranks)}"
            drawing.collective("nccl", seconds, sequence[name], ranks=ranks, group=group, stream=stream, size=size)
            sequence[name] += 1


def groups_of(rank: int, tensor: int, world: int) -> dict[str, tuple[int, ...]]:
    """Tensor-parallel neighbours, and data-parallel ranks of the same place in their tensor group."""
    first = rank // tensor * tensor
    return {
        "tensor": tuple(range(first, first + tensor)),
        "data": tuple(range(rank % tensor, world, tensor)),
        "world": tuple(range(world)),
    }


def jobs(seed: int, tensor: int, world: int) -> tuple[ExecutionGraph, ExecutionGraph]:
    """Rank 0 for all of them, and all of them."""
    drawings = [Drawing(rank) for rank in range(world)]
    for drawing in drawings:
        program(drawing, seed, groups_of(drawing.rank, tensor, world))
    return together(drawings[0], multiplicity={0: world}), together(*drawings)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([(1, 4), (2, 4), (2, 8), (4, 8)]))
def test_one_rank_stands_for_all(seed: int, shape: tuple[int, int]):
    folded, whole = jobs(seed, *shape)
    one, all_of_them = simulate_iterations(folded, 3).timeline, simulate_iterations(whole, 3).timeline
    assert one.iteration_seconds == pytest.approx(all_of_them.iteration_seconds)
    for task in folded.ranks[0].tasks:
        assert one.task(0, task.id, 2).end == pytest.approx(all_of_them.task(0, task.id, 2).end)


@pytest.mark.parametrize("network", ["infiniband-ndr:8", "infiniband-ndr:2", "infiniband-ndr:1"])
def test_folded_groups_share_the_network_as_all_of_them_do(network: str):
    """8 data-parallel groups, one GPU of each on either node, send at the same time over 8, 2 or 1 cards.

    The analytic model is used. Alone each reaches one card; the slow-down by the others is in the price of the folded
    one and in the simulation of all. 64 MB: latency, which is not shared, is small.
    """
    cluster = load_cluster("h100-sxm", 16, 2, network)
    drawings = [Drawing(rank) for rank in range(16)]
    for drawing in drawings:
        ranks = (drawing.rank % 8, drawing.rank % 8 + 8)
        drawing.collective("nccl", 0, 0, ranks=ranks, group=f"data {ranks[0]}", size=64 << 20, launch=0)

    def step(graph: ExecutionGraph) -> float:
        ranks = tuple(replace(r, tasks=tuple(replace(t, duration=None) for t in r.tasks)) for r in graph.ranks)
        return simulate(price_collectives(replace(graph, ranks=ranks), cluster, CollectiveModel(cluster))).step_seconds

    folded = step(together(drawings[0], multiplicity={0: 16}))
    assert folded == pytest.approx(step(together(*drawings)), rel=0.1)
