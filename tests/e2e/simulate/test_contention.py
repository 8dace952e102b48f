"""Kernels and collectives on one GPU slow each other: toy graphs by hand, random ones by a slower method."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.simulate.link_sharing import LinkSharing, fair_speeds
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import ExecutionGraph, GpuLoad
from tests.e2e.drawn_graphs import Drawing, random_graph, together

# Beside a collective that takes half of the memory and keeps half of the multiprocessors, a kernel that needs all of
# both has a third of its speed, and the collective two thirds.
HALF = GpuLoad(0.5, 0.5)
WHOLE = GpuLoad(1.0)


def loaded(graph: ExecutionGraph, loads: dict[str, GpuLoad]) -> ExecutionGraph:
    ranks = (
        replace(rank, tasks=tuple(replace(task, load=loads.get(task.name)) for task in rank.tasks))
        for rank in graph.ranks
    )
    return replace(graph, ranks=tuple(ranks))


def spans(graph: ExecutionGraph) -> dict[str, tuple[float, float]]:
    """Start and end of every task of the first rank, by name."""
    timeline = simulate(graph)
    layout, rank = timeline.layouts[0], graph.ranks[0]
    nodes = [layout.offset + layout.actions + task.id for task in rank.tasks]
    return {
        task.name: (float(timeline.start[node]), float(timeline.end[node]))
        for task, node in zip(rank.tasks, nodes, strict=True)
    }


def drawing(kernels: dict[str, float], transfer: float, ranks: tuple[int, ...] = (0,)) -> ExecutionGraph:
    """The collective ``c`` from the beginning, beside ``kernels`` one after another."""
    drawn = []
    for rank in ranks:
        d = Drawing(rank)
        d.collective("c", transfer, 0, ranks=ranks, launch=0)
        for name, value in kernels.items():
            d.kernel(name, value, launch=0)
        drawn.append(d)
    return together(*drawn)


def test_a_kernel_and_a_collective_slow_each_other():
    graph = loaded(drawing({"a": 3}, 4), {"a": WHOLE, "c": HALF})
    # The collective ends at 4 / (2/3) = 6, where the kernel has done 2 of its 3 seconds; the last one it runs alone.
    assert spans(graph) == {"c": (0, pytest.approx(6)), "a": (0, pytest.approx(7))}


def test_a_kernel_runs_alone_before_and_after():
    d = Drawing()
    d.kernel("a", 5, launch=0)
    d.host(3)
    d.collective("c", 2, 0, ranks=(0,), launch=0)
    graph = loaded(together(d), {"a": WHOLE, "c": HALF})
    # From 3 to 6 the collective; the kernel has done 3, then 1 more, and 1 is left.
    assert spans(graph) == {"a": (0, pytest.approx(7)), "c": (3, pytest.approx(6))}


def test_kernels_follow_one_another_at_the_speed_of_the_moment():
    graph = loaded(drawing({"a": 1, "b": 1, "d": 1}, 4), {"a": WHOLE, "b": WHOLE, "d": WHOLE, "c": HALF})
    found = spans(graph)
    assert [found[name][1] for name in ("a", "b", "d", "c")] == pytest.approx([3, 6, 7, 6])


def test_a_kernel_that_needs_little_loses_little():
    graph = loaded(drawing({"a": 3}, 4), {"a": GpuLoad(0.25), "c": HALF})
    # There is memory for both; of the multiprocessors it misses half, for a quarter of its time.
    assert spans(graph) == {"c": (0, 4), "a": (0, pytest.approx(3 / (1 - 0.25 * 0.5)))}


def test_tasks_without_a_load_are_as_they_are():
    for loads in ({}, {"a": WHOLE}, {"c": HALF}):
        assert spans(loaded(drawing({"a": 3}, 4), loads)) == {"c": (0, 4), "a": (0, 3)}


def test_a_collective_is_slowed_for_all_its_ranks():
    graph = drawing({"a": 3}, 4, ranks=(0, 1))
    first, second = graph.ranks
    slowed = loaded(replace(graph, ranks=(first,)), {"a": WHOLE, "c": HALF}).ranks[0]
    other = loaded(replace(graph, ranks=(second,)), {"c": HALF}).ranks[0]
    timeline = simulate(replace(graph, ranks=(slowed, other)))
    ends = [float(timeline.end[layout.offset + layout.actions]) for layout in timeline.layouts]
    assert ends == pytest.approx([6, 6])


def test_what_waits_for_a_slowed_kernel_waits_longer():
    d = Drawing()
    d.collective("c", 4, 0, ranks=(0,), launch=0)
    d.kernel("a", 3, launch=0)
    d.event(1, record=7, wait=8)
    d.kernel("after", 1, stream=8, launch=0)
    d.synchronize()
    d.host(2)
    graph = loaded(together(d), {"a": WHOLE, "c": HALF})
    assert spans(graph)["after"] == (pytest.approx(7), pytest.approx(8))
    assert simulate(graph).step_seconds == pytest.approx(10)


def test_iterations_are_alike():
    graph = loaded(drawing({"a": 3}, 4), {"a": WHOLE, "c": HALF})
    steady = simulate_iterations(graph, 6)
    # Both streams always have work. While the collectives do, at 4 / (2/3) = 6 s each, kernels do 2 of every 3 s.
    assert steady.timeline.end.max() == pytest.approx(6 * 6 + 6 * 3 - 6 * 2)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_ranks_does_not_matter(seed: int):
    graph = random_graph(seed)
    names = {task.name: WHOLE for rank in graph.ranks for task in rank.tasks if task.collective is None}
    names |= {task.name: HALF for rank in graph.ranks for task in rank.tasks if task.collective is not None}
    graph = loaded(graph, names)
    turned = simulate(replace(graph, ranks=graph.ranks[::-1]))
    timeline = simulate(graph)
    for layout, other in zip(timeline.layouts, turned.layouts[::-1], strict=True):
        ends = timeline.end[layout.offset : layout.offset + layout.nodes]
        assert ends == pytest.approx(turned.end[other.offset : other.offset + other.nodes], rel=1e-9)
    assert timeline.step_seconds >= simulate(loaded(graph, {})).step_seconds - 1e-9


kernels = st.lists(st.tuples(st.floats(0, 10), st.floats(0.1, 5), st.sampled_from([0.5, 1.0])), max_size=5)
transfers = st.lists(
    st.tuples(st.floats(0, 10), st.floats(0.1, 5), st.sampled_from([0.1, 0.4]), st.sampled_from([0.0, 0.2])),
    min_size=1,
    max_size=4,
)


def slow_ends(kernels, transfers) -> list[float]:
    """Every speed anew at every moment, from the sentence that defines it."""
    starts = [start for start, *_ in (*kernels, *transfers)]
    left = [seconds for _, seconds, *_ in (*kernels, *transfers)]
    memory = [busy for *_, busy in kernels] + [share for _, _, share, _ in transfers]
    found: dict[int, float] = {}
    now = 0.0
    while len(found) < len(starts):
        active = [n for n, start in enumerate(starts) if start <= now and n not in found]
        fair = fair_speeds({n: {"gpu": memory[n]} for n in active})
        held = sum(transfers[n - len(kernels)][3] for n in active if n >= len(kernels))
        speeds = {n: v * (1 - memory[n] * held if n < len(kernels) else 1) for n, v in fair.items()}
        coming = min((start for start in starts if start > now), default=inf)
        step = min([coming - now] + [left[n] / speed for n, speed in speeds.items()])
        for n, speed in speeds.items():
            left[n] -= speed * step
        now = coming if step == coming - now else now + step
        found |= {n: now for n in active if left[n] <= 1e-9}
    return [found[n] for n in range(len(starts))]


@settings(max_examples=200, deadline=None)
@given(kernels, transfers)
def test_random_loads_agree_with_the_slow_method(kernels, transfers):
    sharing = LinkSharing()
    for number, (start, seconds, busy) in enumerate(kernels):
        sharing.add_kernel(number, start, seconds, "gpu", busy)
    for number, (start, seconds, memory, held) in enumerate(transfers, len(kernels)):
        sharing.add(number, start, seconds, {"gpu": memory}, {"gpu": held})
    found: dict[int, float] = {}
    while (moment := sharing.next_moment()) < inf:
        ended = sharing.step()
        if ended is not None:
            found[ended.what] = moment
            if ended.gpu:
                sharing.leave(ended, moment)
    assert [found[n] for n in sorted(found)] == pytest.approx(slow_ends(kernels, transfers), abs=1e-6)
    # Nothing is faster than alone.
    for number, (start, seconds, *_) in enumerate((*kernels, *transfers)):
        assert found[number] >= start + seconds - 1e-9
