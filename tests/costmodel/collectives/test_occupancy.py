"""Channels of NCCL by links and size, and the shares of a GPU that follow."""

from __future__ import annotations

import pytest

from costmodel.collectives.physics import channels, occupancy
from costmodel.gpu.families.rates import dram_bandwidth
from costmodel.machines.cluster import load_cluster
from costmodel.operators.collective_transfer import CollectiveTransfer

LARGE = 400e6


@pytest.mark.parametrize(
    ("gpu", "kind", "ranks", "nodes", "expected"),
    [
        ("h100-sxm", "all_gather", 8, 1, 24),
        ("h100-sxm", "all_to_all", 8, 1, 32),
        ("h100-sxm", "all_gather", 16, 2, 16),
        ("h100-sxm", "send_recv", 2, 2, 2),
        ("a100-sxm-40gb", "reduce_scatter", 8, 1, 24),
        ("v100-sxm2-16gb", "all_reduce", 8, 1, 12),
        ("b200-sxm", "all_reduce", 8, 1, 32),
        ("l40s", "all_reduce", 4, 1, 2),
        ("aws-p4d", "all_reduce", 16, 2, 8),
    ],
)
def test_channels_follow_from_the_links(gpu: str, kind: str, ranks: int, nodes: int, expected: int) -> None:
    cluster = load_cluster(gpu, ranks if nodes == 1 else 8 * nodes, nodes)
    assert channels(CollectiveTransfer(kind, LARGE, ranks, nodes), cluster) == expected  # type: ignore[arg-type]


def test_small_transfers_take_few_channels_and_one_rank_none() -> None:
    cluster = load_cluster("h100-sxm", 8)
    assert channels(CollectiveTransfer("all_gather", 512 * 64 * 3 / 7, 8), cluster) == 3
    assert channels(CollectiveTransfer("all_gather", 1, 8), cluster) == 1
    assert channels(CollectiveTransfer("all_gather", LARGE, 1), cluster) == 0


def test_shares_of_the_gpu() -> None:
    cluster = load_cluster("a100-sxm-80gb", 8)
    transfer = CollectiveTransfer("all_gather", LARGE / 8, 8)
    # All that the others have comes in: 7/8 of 400 MB in 2 ms, three times through the memory.
    taken = occupancy(transfer, 2e-3, cluster)
    assert taken.held == pytest.approx(24 / 108)
    assert taken.memory == pytest.approx(3 * 0.35e9 / 2e-3 / dram_bandwidth(cluster.machine))
    assert occupancy(transfer, 1e-9, cluster).memory == 1.0
    assert occupancy(CollectiveTransfer("barrier", 0, 8), 1e-5, cluster).memory == 0.0
