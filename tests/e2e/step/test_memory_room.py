"""Room for tensors on a GPU, and whether what a step needs fits into it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.machines.cluster import load_cluster
from costmodel.machines.machine_file import PACKAGED_DIRECTORY, load_machine
from e2e.explain.rank_figures import fits_memory
from e2e.step.execution_graph import Collective, ExecutionGraph, Launch, RankGraph, Task
from e2e.step.memory_room import communicator_bytes, largest_fitting, memory_room, verdict

GPUS = sorted(path.stem for path in (PACKAGED_DIRECTORY / "gpu").glob("*.yaml"))
ORDER = ("fits", "may not fit", "does not fit")
MIB = 1 << 20


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 40))
def test_who_needs_more_fits_no_better(needed: int, more: int, room: int) -> None:
    first, second = verdict(needed, room), verdict(needed + more, room)
    assert ORDER.index(first) <= ORDER.index(second)
    assert (first == "fits") == (needed <= largest_fitting(room))
    assert fits_memory(first) == {"fits": True, "may not fit": None, "does not fit": False}[first]


def test_the_lines_are_at_95_and_105_percent() -> None:
    room = 1000
    assert [verdict(size, room) for size in (0, 950, 951, 1050, 1051)] == [
        "fits", "fits", "may not fit", "may not fit", "does not fit",
    ]  # fmt: skip
    assert verdict(None, room) == "not known" and fits_memory("not known") is None


@pytest.mark.parametrize("name", GPUS)
def test_a_process_sees_less_than_the_card_has_and_more_than_tensors_may_take(name: str) -> None:
    machine = load_machine(name)
    memory = machine.memory[-1]
    assert 0.9 * memory.capacity_bytes < memory.usable < memory.capacity_bytes
    assert 0.9 * memory.usable < memory_room(machine) < memory.usable


def graph(*groups: tuple[str, tuple[int, ...]]) -> ExecutionGraph:
    """One rank that takes part in a collective of each of ``groups``, twice."""
    tasks = tuple(
        Task(number, kind, "collective", 0, collective=Collective(kind, f"{kind}{ranks}", ranks, number, 1 << 20))
        for number, (kind, ranks) in enumerate(groups * 2)
    )
    launches = tuple(Launch(task.id) for task in tasks)
    return ExecutionGraph((RankGraph(0, {"main": launches}, tasks),), source="toy")


EIGHT = tuple(range(8))


def test_a_ring_of_24_channels_has_24_connections() -> None:
    cluster = load_cluster("dgx-h100", 8)
    assert communicator_bytes(graph(("all_gather", EIGHT)), cluster) == 24 * 12 * MIB
    # 32 channels to each of seven peers: 3.3 GB were seen on 8 H100 (github.com/NVIDIA/nccl issue 1685).
    exchange = communicator_bytes(graph(("all_to_all", EIGHT)), cluster)
    assert math.isclose(exchange, 3.3e9, rel_tol=0.2)


@given(st.lists(st.tuples(st.sampled_from(["all_reduce", "all_gather", "all_to_all", "send"]),
                          st.sampled_from([(0,), (0, 1), (0, 8), EIGHT, tuple(range(16))])), max_size=6))  # fmt: skip
def test_more_communicators_leave_no_more_room(groups: list[tuple[str, tuple[int, ...]]]) -> None:
    cluster = load_cluster("dgx-h100", 16)
    rooms = [memory_room(cluster.machine, graph(*groups[:count]), cluster) for count in range(len(groups) + 1)]
    assert rooms == sorted(rooms, reverse=True) and rooms[0] == memory_room(cluster.machine)
    assert memory_room(cluster.machine, graph(*groups)) == rooms[0]  # nobody knows where they run
