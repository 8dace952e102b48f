from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.collectives.physics import Constants, Protocol, analyse, rates_of, smooth_minimum
from costmodel.machines.cluster import Cluster, load_cluster
from costmodel.machines.cluster_file import cluster_files
from costmodel.machines.machine_records import Link
from costmodel.operators.collective_transfer import COLLECTIVE_KINDS, CollectiveTransfer

# One protocol that starts at once, needs 1 s a hop inside a node and 10 s between nodes, and uses links fully.
PLAIN = Protocol("plain", 0.0, 1.0, 1.0, 1.0)
ONE = Constants((PLAIN,), dataclasses.replace(PLAIN, name="sum"), 0.0)


@pytest.fixture
def cluster(toy_gpu) -> Cluster:
    """4 GPUs of the constants' clock to a node, 100 B/s and 1 s a hop; one card of 10 B/s and 10 s a hop."""
    gpu = dataclasses.replace(toy_gpu, gpu=dataclasses.replace(toy_gpu.chip(), clock_hz=1.98e9))
    return Cluster(
        "toy", gpu, 4, 4, Link("nvlink", 100.0, 1.0, "invented"), Link("network", 10.0, 10.0, "invented"),
        node_gpus=4,
    )  # fmt: skip


def seconds(cluster, *arguments, **keywords):
    return analyse(CollectiveTransfer(*arguments, **keywords), cluster, ONE).seconds


def test_inside_a_node_by_hand(cluster):
    assert seconds(cluster, "all_reduce", 400, 4) == pytest.approx(6 + 600 / 100)  # 2 x 3 hops, 2 x 3/4 of 400 B
    assert seconds(cluster, "all_gather", 100, 4) == pytest.approx(3 + 300 / 100)
    assert seconds(cluster, "reduce_scatter", 400, 4) == pytest.approx(3 + 300 / 100)
    assert seconds(cluster, "all_to_all", 400, 2) == pytest.approx(1 + 200 / 100)
    assert seconds(cluster, "all_to_all", 400, 2, busiest_bytes=300) == pytest.approx(1 + 300 / 100)
    assert seconds(cluster, "send_recv", 400, 2) == pytest.approx(1 + 4)
    assert seconds(cluster, "broadcast", 400, 4) == pytest.approx(3 + 4)
    assert seconds(cluster, "reduce", 400, 4) == pytest.approx(3 + 4)
    assert seconds(cluster, "barrier", 400, 4) == pytest.approx(6 + 1.5 * 4 / 100)


def test_a_ranks_own_part_moves_through_its_memory(cluster):
    moved = dataclasses.replace(ONE, chunk=3.0)
    for kind, own in (("all_gather", 100), ("all_reduce", 100 / 4), ("all_to_all", 100 / 4)):
        transfer = CollectiveTransfer(kind, 100, 4)
        extra = analyse(transfer, cluster, moved).seconds - analyse(transfer, cluster, ONE).seconds
        assert extra == pytest.approx(3 * own / 1e6)  # the toy's DRAM: 1e6 B/s


def test_starts_and_hops_inside_a_node_take_clock_cycles(cluster):
    chip = cluster.machine.chip()
    slow = dataclasses.replace(cluster.machine, gpu=dataclasses.replace(chip, clock_hz=0.99e9))
    started = dataclasses.replace(ONE, protocols=(dataclasses.replace(PLAIN, start=5.0),))
    half = dataclasses.replace(cluster, machine=slow)
    one = CollectiveTransfer("all_gather", 100, 4)  # 5 s, 3 hops of 1 s, 3 s of bytes
    assert analyse(one, cluster, started).seconds == pytest.approx(5 + 3 + 3)
    assert analyse(one, half, started).seconds == pytest.approx(2 * (5 + 3) + 3)
    across = CollectiveTransfer("send_recv", 400, 2, 2)  # a network's hop has no such clock
    assert analyse(across, half, ONE).seconds == pytest.approx(10 + 40)


def test_across_nodes_the_slower_link_counts(cluster):
    assert seconds(cluster, "send_recv", 400, 2, 2) == pytest.approx(10 + 40)
    # Ring of 8: 7 hops, 2 of them between nodes; 7 shards leave each node at 10 B/s.
    assert seconds(cluster, "all_gather", 100, 8, 2) == pytest.approx(7 * 6 / 8 + 7 * 2 / 8 * 10 + 700 / 10)
    # 3/4 of what a rank sends stays out of its node of 2 ranks: 300 B x 4/... each of 4 nodes sends 2 x 600 B.
    direct = seconds(cluster, "all_to_all", 800, 8, 4)
    assert direct == pytest.approx(1 + 10 * (1 + 0.25 * 5) + 2 * 600 / 10)


def test_broadcasts_and_reductions_to_one_are_chains_however_many_nodes(cluster):
    for kind in ("broadcast", "reduce"):  # NCCL has trees for all-reduces alone
        assert seconds(cluster, kind, 400, 8, 2) == pytest.approx(6 + 10 + 400 / 10)
        assert seconds(cluster, kind, 400, 16, 4) == pytest.approx(12 + 30 + 400 / 10)


def test_one_gpu_of_each_node_gathers_in_aggregated_trees(cluster):
    ring, trees = 3 * 10 + 300 / 10, 10 * (2 / 3.5 + 0.2 * 4) + 300 / 10 / 0.75
    for kind, size in (("all_gather", 100), ("reduce_scatter", 400)):
        assert seconds(cluster, kind, size, 4, 4) == pytest.approx(smooth_minimum([ring, trees]))
        before = dataclasses.replace(cluster, nccl="2.22.3")  # the library did not have them yet
        assert seconds(before, kind, size, 4, 4) == pytest.approx(ring)
    # Several GPUs to a node: rings alone, whose hops grow with the ranks.
    assert seconds(cluster, "all_gather", 1e-9, 16, 4) == pytest.approx(15 * 12 / 16 + 15 * 4 / 16 * 10)


def test_transfers_that_share_links(cluster):
    alone = rates_of(CollectiveTransfer("all_reduce", 1, 4), cluster)
    shared = rates_of(CollectiveTransfer("all_reduce", 1, 4, sharing=2), cluster)
    assert shared.gpu == pytest.approx(alone.gpu / 2)
    # Four data-parallel groups, one rank of each on every node, meet on the card but not on NVLink.
    across = rates_of(CollectiveTransfer("all_reduce", 1, 4, 4, sharing=4), cluster)
    assert across.node == pytest.approx(10 / 4) and across.gpu == pytest.approx(100)


def test_each_gpu_reaches_its_own_card_alone(cluster):
    rich = dataclasses.replace(cluster, network_cards=4)
    assert rates_of(CollectiveTransfer("send_recv", 1, 2, 2), rich).node == pytest.approx(10)
    assert rates_of(CollectiveTransfer("all_reduce", 1, 8, 2), rich).node == pytest.approx(40)
    assert rates_of(CollectiveTransfer("all_reduce", 1, 2, 2, sharing=4), rich).node == pytest.approx(10)


def test_one_rank_sends_nothing(cluster):
    assert seconds(cluster, "all_reduce", 1e9, 1) == 0.0


def test_smooth_minimum():
    assert smooth_minimum([1.0, 100.0]) == pytest.approx(1.0)
    assert smooth_minimum([1.0, 1.0]) == pytest.approx(2 ** (-1 / 8))
    assert smooth_minimum([0.0, 1.0]) == 0.0


def test_switches_add_what_rings_would_pass_on():
    h100, a100 = load_cluster("dgx-h100", 8), load_cluster("dgx-a100", 8)
    large = CollectiveTransfer("all_reduce", 1 << 30, 8)
    assert analyse(large, h100).algorithm == "in-switch" and analyse(large, a100).algorithm == "ring"
    # nccl-tests reaches 445 GB/s of bus bandwidth on 8 H100, more than NVLink's 360 GB/s.
    assert 1.75 * 2**30 / analyse(large, h100).seconds > 380e9


def test_switches_have_nothing_to_add_for_one_gpu_of_each_node():
    pair = load_cluster("dgx-h100", 16, 2)
    lone = analyse(CollectiveTransfer("all_reduce", 1 << 30, 2, 2), pair)
    # A card of 48 GB/s carries the buffer once; the smooth minimum takes up to 2 % off, an algorithm too many took 8.
    assert lone.algorithm == "ring" and lone.seconds > 0.98 * (1 << 30) / 48e9
    assert analyse(CollectiveTransfer("all_reduce", 1 << 30, 4, 2), pair).algorithm == "in-switch"


CLUSTERS = sorted(cluster_files())


@functools.cache
def full(name: str, nodes: int) -> Cluster:
    """``nodes`` full nodes of the cluster ``name``."""
    return load_cluster(name, load_cluster(name, 2).node_gpus * nodes, nodes)


SIZES = st.floats(0, 34).map(lambda power: 2.0**power)


# Of an all-to-all less stays inside a node when there are more: where PCIe is slower than the network, that is faster.
SPREAD = [kind for kind in COLLECTIVE_KINDS if kind != "all_to_all"]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(CLUSTERS), st.sampled_from(SPREAD), SIZES)
def test_more_nodes_never_take_less_time_for_the_same_buffer(name, kind, size):
    times = []
    for nodes in (2, 4, 8, 64):
        cluster = full(name, nodes)
        whole = size / cluster.gpus if kind == "all_gather" else size
        times.append(analyse(CollectiveTransfer(kind, whole, cluster.gpus, nodes), cluster).seconds)
    assert all(later >= earlier * 0.999 for earlier, later in zip(times, times[1:], strict=False))


def test_ranks_that_are_no_neighbours_do_not_reach_one_another_over_bridges() -> None:
    """GPUs 0 and 2 of bridged pairs talk through the host, as three GPUs do; switches reach every GPU alike."""
    for name, slower in (("a100-pairwise", True), ("dgx-a100", False), ("dgx-1v", False)):
        cluster = load_cluster(name, 4)
        neighbours, apart, three = (
            analyse(CollectiveTransfer("all_gather", 64 << 20, ranks, span=span), cluster).gpu_seconds
            for ranks, span in ((2, 0), (2, 3), (3, 0))
        )
        if slower:
            assert apart > 5 * neighbours and apart == pytest.approx(three / 2, rel=0.1), name
        else:
            assert apart == neighbours, name
