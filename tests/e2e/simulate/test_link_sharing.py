"""Shares of links: by hand, and properties of random transfers against a slower method."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from e2e.simulate.link_sharing import LinkSharing, fair_speeds
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import ExecutionGraph
from tests.e2e.drawn_graphs import Drawing, random_graph, together

names = st.sampled_from(["a", "b", "c", "d"])
shares = st.dictionaries(names, st.sampled_from([0.25, 0.5, 0.75, 1.0]), max_size=3)
transfers = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5), shares), min_size=1, max_size=8)


def ends(given_transfers) -> list[float]:
    """When each (start, seconds, links) ends."""
    sharing = LinkSharing()
    for number, (start, seconds, links) in enumerate(given_transfers):
        sharing.add(number, start, seconds, links)
    found = {}
    before = 0.0
    while (moment := sharing.next_moment()) < inf:
        assert moment >= before
        before = moment
        ended = sharing.step()
        if ended is not None:
            found[ended.what] = moment
    return [found[number] for number in range(len(given_transfers))]


def slow_ends(given_transfers) -> list[float]:
    """The same, all speeds anew at every moment."""
    left = {number: seconds for number, (_, seconds, _) in enumerate(given_transfers)}
    found: dict[int, float] = {}
    now = 0.0
    while len(found) < len(given_transfers):
        active = {n: links for n, (start, _, links) in enumerate(given_transfers) if start <= now and n not in found}
        speeds = fair_speeds(active)
        coming = [start for n, (start, _, _) in enumerate(given_transfers) if start > now]
        step = min([start - now for start in coming] + [left[n] / speed for n, speed in speeds.items()])
        for n, speed in speeds.items():
            left[n] -= speed * step
        now = min(coming) if coming and step == min(coming) - now else now + step
        found |= {n: now for n in speeds if left[n] <= 1e-9}
    return [found[number] for number in range(len(given_transfers))]


def test_two_on_one_link_take_twice_as_long():
    assert ends([(0, 4, {"a": 1}), (0, 4, {"a": 1})]) == [8, 8]


def test_who_comes_later_is_served_from_then_on():
    # 2 s alone, then both at half speed; 2 s of the first are left at 2, so it ends at 6; the second ends alone.
    assert ends([(0, 4, {"a": 1}), (2, 4, {"a": 1})]) == [6, 8]


def test_other_links_do_not_matter():
    assert ends([(0, 4, {"a": 1}), (1, 4, {"b": 1}), (2, 1, {})]) == [4, 5, 3]


def test_a_link_with_room_slows_nobody():
    assert ends([(0, 4, {"a": 0.5}), (0, 4, {"a": 0.5})]) == [4, 4]
    assert ends([(0, 3, {"a": 1}), (0, 3, {"a": 0.5})]) == pytest.approx([4.5, 4.5])


@given(st.lists(shares, min_size=1, max_size=8))
def test_speeds_are_max_min_fair(links):
    speeds = fair_speeds(dict(enumerate(links)))
    load = {name: sum(speeds[n] * use.get(name, 0) for n, use in enumerate(links)) for name in "abcd"}
    assert all(value <= 1 + 1e-9 for value in load.values())
    for number, speed in speeds.items():
        assert 0 < speed <= 1
        full = [name for name in links[number] if load[name] >= 1 - 1e-9]
        slowest = [max(speeds[n] for n, use in enumerate(links) if name in use) <= speed + 1e-9 for name in full]
        # Slower than alone only for a full link on which nobody is faster.
        assert speed == 1 or any(slowest)


@settings(deadline=None, max_examples=200)
@given(transfers)
def test_agrees_with_all_speeds_anew(given_transfers):
    assert ends(given_transfers) == pytest.approx(slow_ends(given_transfers), abs=1e-6)


@given(transfers)
def test_never_earlier_than_alone_never_later_than_one_after_another(given_transfers):
    total = sum(seconds for _, seconds, _ in given_transfers)
    last = max(start for start, _, _ in given_transfers)
    for (start, seconds, _), end in zip(given_transfers, ends(given_transfers), strict=True):
        assert start + seconds <= end + 1e-9
        assert end <= last + total + 1e-9


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=8))
def test_a_link_is_never_idle_while_there_is_work(moves):
    """One link that each takes whole: busy as long as one after another, whoever comes first."""
    found = ends([(start, seconds, {"a": 1.0}) for start, seconds in moves])
    free = 0.0
    for start, seconds in sorted(moves):
        free = max(free, start) + seconds
    assert max(found) == pytest.approx(free)


# --- in graphs -------------------------------------------------------------------------------------


def linked(drawing: Drawing, place: int, links: tuple[tuple[str, float], ...]) -> None:
    drawing.tasks[place] = replace(drawing.tasks[place], links=links)


def pairs(late: float) -> ExecutionGraph:
    """Ranks 0, 1 and ranks 2, 3 reduce at the same time over one network; the second pair begins ``late``."""
    drawings = [Drawing(rank) for rank in range(4)]
    for d in drawings:
        first = d.rank // 2 * 2
        d.host(late if first else 0)
        d.collective("nccl", 10, 0, group=f"pair {first}", ranks=(first, first + 1), launch=0)
        d.synchronize(stream=20)
        linked(d, 0, (("network", 1.0), (f"gpu {d.rank}", 1.0)))
    return together(*drawings)


def test_collectives_of_different_groups_share_a_network():
    timeline = simulate(pairs(4))
    assert [timeline.task(rank, 0).end for rank in range(4)] == [16, 16, 20, 20]
    assert [timeline.task(rank, 0).ready for rank in range(4)] == [0, 0, 4, 4]


def test_later_work_of_ranks_that_run_ahead_is_not_seen_too_early():
    """Rank 2 and 3 reach their transfer at 100 long before the others' end is known; these never overlap it."""
    timeline = simulate(pairs(100))
    assert [timeline.task(rank, 0).end for rank in range(4)] == [10, 10, 110, 110]


def test_what_follows_a_slowed_transfer_shares_too():
    """After its first transfer, slowed until 16, the first pair begins another one; the second pair's ends at 24."""
    graph = pairs(4)
    drawings = [Drawing(rank) for rank in range(4)]
    for d, rank in zip(drawings, graph.ranks, strict=True):
        d.tasks, d.threads = list(rank.tasks), {name: list(actions) for name, actions in rank.threads.items()}
        if d.rank < 2:
            d.collective("nccl", 10, 1, group="pair 0", launch=0)
            linked(d, 1, (("network", 1.0),))
    timeline = simulate(together(*drawings))
    # From 16: the second pair has 4 left, at half speed until 24; the first has then done 4 of 10 and ends at 30.
    assert (timeline.task(2, 0).end, timeline.task(0, 1).end) == (24, 30)


def test_sharing_goes_on_in_every_iteration():
    steady = simulate_iterations(pairs(0), 4)
    assert steady.period_seconds == 20 and steady.settled


def test_the_last_iteration_is_not_taken_for_one_that_has_not_settled():
    """Every 40 a transfer of 10 begins, and another 35 later, which shares the link with the next iteration's first:
    it ends at 50, in the last iteration, where nothing follows, at 45.
    """
    drawings = [Drawing(rank) for rank in range(2)]
    for d in drawings:
        d.collective("early", 10, 0, stream=20, launch=0)
        d.host(35)
        d.collective("late", 10, 1, stream=21, launch=0)
        d.host(5)
        for place in range(2):
            linked(d, place, (("network", 1.0),))
    steady = simulate_iterations(together(*drawings), 6)
    assert steady.timeline.iteration_seconds == (50, 40, 40, 40, 40, 35)
    assert steady.period_seconds == 40 and steady.settled


def with_links(graph: ExecutionGraph, chosen: list[str]) -> ExecutionGraph:
    """Every collective uses one of a few links, by its sequence number, and its GPU."""

    def links(rank, task):
        if task.collective is None:
            return task
        name = chosen[task.collective.sequence % len(chosen)]
        return replace(task, links=((name, 1.0), (f"gpu {rank.rank}", 0.5)))

    ranks = tuple(replace(rank, tasks=tuple(links(rank, task) for task in rank.tasks)) for rank in graph.ranks)
    return replace(graph, ranks=ranks)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.lists(names, min_size=1, max_size=4))
def test_the_order_of_the_ranks_does_not_matter(seed: int, chosen: list[str]):
    graph = with_links(random_graph(seed, steps=60), chosen)
    one, other = simulate(graph), simulate(replace(graph, ranks=graph.ranks[::-1]))
    for rank in graph.ranks:
        for task in rank.tasks:
            assert one.task(rank.rank, task.id).end == pytest.approx(other.task(rank.rank, task.id).end)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 10**6), st.lists(names, min_size=1, max_size=4))
def test_sharing_never_makes_anything_earlier_and_links_of_ones_own_change_nothing(seed: int, chosen: list[str]):
    graph = random_graph(seed, steps=60)
    alone, shared = simulate(graph), simulate(with_links(graph, chosen))
    assert (shared.end >= alone.end - 1e-9).all()
    own = with_links(graph, [f"link {number}" for number in range(100)])
    ranks = tuple(
        replace(rank, tasks=tuple(replace(task, links=task.links[:1]) for task in rank.tasks)) for rank in own.ranks
    )
    assert simulate(replace(own, ranks=ranks)).end == pytest.approx(alone.end)
