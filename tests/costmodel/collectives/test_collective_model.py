from __future__ import annotations

import dataclasses
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import InputError, UnsupportedOperatorError
from costmodel.collectives import CollectiveModel, collective_cost_model
from costmodel.collectives.calibration import (
    Calibration,
    CollectiveSweep,
    Margins,
    adds,
    calibrations,
    calibrations_for,
    read_calibration,
    tiers_of,
    write_calibration,
)
from costmodel.collectives.collective_model import curve_of
from costmodel.collectives.physics import can_reduce
from costmodel.machines.cluster import Cluster, load_cluster, nccl_version
from costmodel.machines.cluster_file import cluster_files
from costmodel.operators.collective_transfer import COLLECTIVE_KINDS, CollectiveTransfer
from costmodel.operators.device_work import Gemm

MIB = 1 << 20


@functools.cache
def model_of(name: str, nodes: int = 1) -> tuple[Cluster, CollectiveModel]:
    cluster = load_cluster(name, load_cluster(name, 2).node_gpus * nodes, nodes)
    model = collective_cost_model(cluster)
    assert isinstance(model, CollectiveModel)
    return cluster, model


def one(model, *arguments, **keywords):
    return model.estimate([CollectiveTransfer(*arguments, **keywords)])[0]


def calibration(machine="dgx-h100", gpu="h100-sxm", sweeps=(("2.20", "all_reduce", 8, 1, 1e-5),), topology="switch"):
    """Every sweep takes as many seconds for 1 KiB as given, and 1 ms more per MiB."""
    made = [
        CollectiveSweep(nccl, kind, ranks, nodes, (1024.0, float(MIB)), (start, start + 1e-3))
        for nccl, kind, ranks, nodes, start in sweeps
    ]
    return Calibration(machine, gpu, topology, tuple(made), {"all_reduce": Margins(0.05, 0.15)}, {})


@pytest.mark.parametrize(
    ("name", "kind", "ranks", "size", "seconds"),
    [  # nccl-tests of the public sweeps: medians to two digits
        ("h100-sxm", "all_reduce", 8, 512 * MIB, 2.11e-3),
        ("h100-sxm", "all_gather", 8, 64 * MIB, 1.40e-3),
        ("h100-sxm", "all_reduce", 4, MIB, 18e-6),
        ("l40s", "all_reduce", 2, 64 * MIB, 3.36e-3),
        ("a100-sxm-80gb", "all_reduce", 8, 1024 * MIB, 8.2e-3),
    ],
)
def test_what_was_measured_is_met(name, kind, ranks, size, seconds):
    estimate = one(model_of(name)[1], kind, size, ranks)
    assert estimate.seconds == pytest.approx(seconds, rel=0.05) and estimate.source == "fitted"
    assert estimate.lower < estimate.seconds < estimate.upper and "extrapolates" not in estimate.breakdown


def test_bound_and_breakdown_say_why():
    model = model_of("dgx-h100", 4)[1]
    assert one(model, "all_reduce", 1024, 8).bound == "latency"
    assert one(model, "all_reduce", 1 << 30, 8).bound == "link:gpu"
    far = one(model, "send_recv", 1 << 30, 2, 2)
    assert far.bound == "link:network" and far.breakdown["network_seconds"] > 0.01


def test_beyond_the_measurements_is_flagged_and_wider():
    model = model_of("l40s-pcie-8x", 4)[1]  # nothing with its topology was measured across nodes
    inside, large = one(model, "all_reduce", MIB, 8), one(model, "all_reduce", 1 << 34, 8)
    across = one(model, "all_reduce", MIB, 32, 4)
    assert large.breakdown["extrapolates"] == "size_bytes" and "nodes" in across.breakdown["extrapolates"]
    assert across.source == "analytic" and large.source == "fitted"
    assert large.upper / large.seconds > inside.upper / inside.seconds
    assert across.upper / across.seconds > large.upper / large.seconds


def test_across_nodes_what_was_measured_across_nodes_comes_first():
    h100 = one(model_of("dgx-h100", 2)[1], "all_reduce", 64 * MIB, 16, 2)
    assert h100.seconds == pytest.approx(472e-6, rel=0.03) and h100.source == "fitted"
    h200 = one(model_of("dgx-h200", 2)[1], "all_reduce", 64 * MIB, 16, 2)
    assert h200.breakdown["fitted_on"] == "dgx-h100" and h200.source == "analytic"
    message = one(model_of("hgx-a100-4x-hdr", 2)[1], "send_recv", MIB, 2, 2)
    assert message.breakdown["fitted_on"] == "h100-sxm" and "fitted_on_kind" not in message.breakdown
    many = one(model_of("dgx-h100", 32)[1], "all_reduce", MIB, 256, 32)
    assert many.breakdown["extrapolates"] == "ranks" and many.source == "analytic"


def test_kinds_and_systems_never_measured_borrow_curves_and_say_so():
    broadcast = one(model_of("h100-sxm")[1], "broadcast", MIB, 8)
    assert broadcast.breakdown["fitted_on_kind"] == "all_gather" and broadcast.source == "analytic"
    gather = one(model_of("v100-sxm2-32gb")[1], "all_gather", MIB, 8)  # only its all-reduces were measured
    assert gather.breakdown["fitted_on_kind"] == "all_reduce"
    gather = one(model_of("a100-sxm-80gb")[1], "all_gather", MIB, 8)
    assert "fitted_on_kind" not in gather.breakdown and gather.breakdown["nccl"] == "2.27.3"
    b200 = one(model_of("b200-sxm")[1], "all_gather", 64 * MIB, 8)
    assert b200.source == "analytic" and b200.breakdown["fitted_on"] in ("h100-sxm", "h200-sxm")
    assert b200.seconds < one(model_of("h100-sxm")[1], "all_gather", 64 * MIB, 8).seconds


def test_without_any_calibration_the_analytic_model(tmp_path):
    cluster = load_cluster("dgx-h100", 8)
    estimate = one(collective_cost_model(cluster, tmp_path), "all_reduce", MIB, 8)
    assert estimate.source == "analytic" and estimate.upper == pytest.approx(1.42 * estimate.seconds, rel=0.02)


def test_the_users_calibration_comes_first(user_machines):
    before = one(collective_cost_model(load_cluster("dgx-h100", 8)), "all_reduce", MIB, 8).seconds
    write_calibration(calibration(), user_machines / "calibration")
    model = collective_cost_model(load_cluster("dgx-h100", 8))
    assert one(model, "all_reduce", MIB, 8).seconds == pytest.approx(1e-3, rel=0.02) and before < 1e-4
    # What it lacks still comes from the shipped sweeps of the same GPU.
    gather = one(model, "all_gather", MIB / 8, 8)
    assert gather.seconds < 1e-4 and "fitted_on_kind" not in gather.breakdown


def test_the_version_asked_for_or_the_newest_before_it():
    sweeps = [(version, "all_reduce", 8, 1, start) for version, start in (("2.9.6", 3e-5), ("2.20", 1e-5))]
    cluster = load_cluster("dgx-h100", 8)
    tiers = [[calibration(sweeps=sweeps)]]

    def latency(version):
        return one(CollectiveModel(dataclasses.replace(cluster, nccl=version), tiers), "all_reduce", 1024, 8).seconds

    assert latency("") == latency("2.20.1") == pytest.approx(1e-5)
    assert latency("2.19") == latency("2.9.6") == latency("2.1") == pytest.approx(3e-5)
    assert sorted(["2.27.3", "", "2.9"], key=nccl_version) == ["", "2.9", "2.27.3"]


def test_a_curve_is_analysed_with_the_algorithms_of_its_own_version():
    cluster = load_cluster("dgx-h100", 512, 64)  # newest NCCL: one GPU per node gathers in aggregated trees
    knots = (float(MIB),), (1e-2,)
    old, new = (curve_of(CollectiveSweep(nccl, "all_gather", 64, 64, *knots), cluster) for nccl in ("2.20.5", "2.23.4"))
    assert new.start < 0.8 * old.start and curve_of(CollectiveSweep("", "all_gather", 64, 64, *knots), cluster) == new


def test_sharing_at_full_rate_takes_as_many_times_as_long():
    model = model_of("dgx-h100")[1]
    alone, crowded = one(model, "all_gather", 1 << 28, 8), one(model, "all_gather", 1 << 28, 8, sharing=3)
    assert crowded.seconds == pytest.approx(3 * alone.seconds, rel=0.1)


def test_uneven_all_to_all_waits_for_its_busiest_rank():
    model = model_of("dgx-h100")[1]
    even = one(model, "all_to_all", 1 << 28, 8)
    same = one(model, "all_to_all", 1 << 28, 8, busiest_bytes=(1 << 28) * 7 / 8)
    skewed = one(model, "all_to_all", 1 << 28, 8, busiest_bytes=(1 << 28) * 7 / 4)
    assert same.seconds == pytest.approx(even.seconds) and skewed.seconds > 1.7 * even.seconds


def test_files_round_trip_and_corrupt_ones_are_named(tmp_path):
    path = write_calibration(calibration(), tmp_path)
    assert read_calibration(path) == calibration()
    path.write_text(path.read_text().replace("all_reduce", "all_produce"))
    with pytest.raises(InputError, match=r"collectives\.json: corrupt .*sweeps.0.kind"):
        read_calibration(path)


def test_other_operators_are_refused():
    with pytest.raises(UnsupportedOperatorError, match="Gemm"):
        model_of("dgx-h100")[1].estimate([Gemm(1, 1, 1, 1)])


def test_nearest_measurements_first():
    cluster = load_cluster("a100-sxm-40gb", 8)
    tiers = calibrations_for(cluster)
    assert [each.machine for each in tiers[0]] == ["oci-bm-gpu4-8"]
    assert [each.machine for each in tiers[1]] == ["a100-sxm-80gb"]
    assert {each.topology for tier in tiers for each in tier} == {"switch"}


NAMES = sorted(cluster_files())


@st.composite
def placed(draw):
    nodes = draw(st.sampled_from([1, 2, 16]))
    cluster, model = model_of(draw(st.sampled_from(NAMES)), nodes)
    ranks = draw(st.integers(max(nodes, 2), cluster.gpus_per_node * nodes))  # not always as many on every node
    kind, size = draw(st.sampled_from(COLLECTIVE_KINDS)), 2.0 ** draw(st.floats(0, 34))
    busiest = draw(st.one_of(st.none(), st.floats(0, 4))) if kind == "all_to_all" else None
    busiest_bytes = None if busiest is None else busiest * size
    return model, CollectiveTransfer(kind, size, ranks, nodes, busiest_bytes, sharing=draw(st.integers(1, 3)))


def scaled(transfer: CollectiveTransfer, factor: float) -> CollectiveTransfer:
    """``factor`` times as many bytes, what the busiest rank sends included."""
    busiest = None if transfer.busiest_bytes is None else transfer.busiest_bytes * factor
    return dataclasses.replace(transfer, size_bytes=transfer.size_bytes * factor, busiest_bytes=busiest)


@settings(max_examples=250, deadline=None)
@given(placed(), st.floats(1 + 1e-6, 32))
def test_monotone_and_continuous_in_the_size_on_every_shipped_cluster(pair, factor):
    model, transfer = pair
    larger, near = scaled(transfer, factor), scaled(transfer, 1 + 1e-7)
    base, more, close = (each.seconds for each in model.estimate([transfer, larger, near]))
    assert more >= base * (1 - 1e-9) and close == pytest.approx(base, rel=1e-5)


@settings(max_examples=100, deadline=None)
@given(placed(), st.floats(0, 4), st.floats(1, 8))
def test_a_busier_rank_never_helps(pair, busiest, factor):
    model, transfer = pair
    even = dataclasses.replace(transfer, kind="all_to_all", busiest_bytes=busiest * transfer.size_bytes)
    skewed = dataclasses.replace(even, busiest_bytes=factor * busiest * transfer.size_bytes)
    base, more = (each.seconds for each in model.estimate([even, skewed]))
    assert more >= base * (1 - 1e-9)


@settings(max_examples=100, deadline=None)
@given(placed())
def test_a_crowd_never_helps(pair):
    model, transfer = pair
    crowded = dataclasses.replace(transfer, sharing=transfer.sharing + 1)
    base, more = (each.seconds for each in model.estimate([transfer, crowded]))
    assert more >= base * (1 - 1e-9)


# NCCL 2.27.3 on A100, both repetitions: a reduce-scatter of 2 MiB takes 49 and 54 us among 4 GPUs, 34 among 8, so
# 44 among 5; an all-gather is alike. Broadcast and reduce borrow their curves.
FASTER_AMONG_MORE = {("dgx-a100", kind, 21): 0.83 for kind in ("reduce_scatter", "reduce", "broadcast")}


@pytest.mark.parametrize("name", ["dgx-h100", "dgx-h200", "l40s-pcie-8x", "dgx-a100", "dgx-b200"])
def test_more_ranks_hardly_take_less_time(name):
    """The same shard, or buffer, among more ranks. Measured all-to-alls of 64 KiB among 4 are a tenth faster than
    among 2; in a cube mesh, which is not among these, more GPUs have more links.
    """
    model = model_of(name)[1]
    for kind in COLLECTIVE_KINDS:
        for power in range(9, 30, 2):
            times = [one(model, kind, 2.0**power, ranks).seconds for ranks in range(2, 9)]
            least = FASTER_AMONG_MORE.get((name, kind, power), 0.85)
            assert all(later > least * earlier for earlier, later in zip(times, times[1:], strict=False)), (kind, power)


def test_a_message_has_two_ends_however_large_the_group():
    model = model_of("dgx-h100", 2)[1]
    assert one(model, "send_recv", MIB, 8).seconds == one(model, "send_recv", MIB, 2).seconds
    assert one(model, "send_recv", MIB, 16, 2).seconds == one(model, "send_recv", MIB, 2, 2).seconds


def test_another_gpus_curves_in_its_own_cycles():
    """Curves of H100 for A100: starts and hops at its clock, bytes at its links."""
    cluster = load_cluster("dgx-a100", 8)
    others = [each for each in calibrations() if each.gpu != "a100-sxm-80gb" and each.gpu != "a100-sxm-40gb"]
    model, own = CollectiveModel(cluster, tiers_of(others, cluster)), collective_cost_model(cluster)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for size in (4096, 64 * 1024, 4 * MIB, 64 * MIB):
            borrowed = one(model, kind, size, 4)
            assert borrowed.breakdown["fitted_on"] in ("h100-sxm", "h200-sxm")
            assert borrowed.seconds == pytest.approx(one(own, kind, size, 4).seconds, rel=0.3)
            assert borrowed.upper / borrowed.seconds < 1.4
    times = [one(model, "all_gather", 2.0**power, 8).seconds for power in range(8, 30)]
    assert times == sorted(times)


def test_odd_numbers_of_gpus_on_a_mesh_take_the_rings_there_are():
    model = model_of("v100-sxm2-32gb")[1]
    rates = {n: 2 * (n - 1) / n * 256 * MIB / one(model, "all_reduce", 256 * MIB, n).seconds for n in range(2, 9)}
    assert rates[6] < rates[4] < rates[7] < rates[8] and rates[5] == pytest.approx(rates[6], rel=0.1)
    assert rates[6] == pytest.approx(2 * 22.5e9, rel=0.1) and rates[7] == pytest.approx(4 * 22.5e9, rel=0.1)


def test_of_another_system_every_version_counts_until_one_is_asked_for(tmp_path):
    """Starts of 30 and 10 us with two versions: own: the newest; else their mean, or the one asked for."""
    sweeps = tuple(
        CollectiveSweep(version, "all_reduce", 8, 1, (1024.0, float(1 << 28)), (start, start + 1e-3))
        for version, start in (("2.23", 3e-5), ("2.29", 1e-5))
    )
    measured = Calibration("h100-sxm", "h100-sxm", "switch", sweeps, {}, {})

    def seconds(name: str, nccl: str = "") -> float:
        cluster = load_cluster(name, 8, nccl=nccl)
        return one(CollectiveModel(cluster, tiers_of([measured], cluster)), "all_reduce", 1024, 8).seconds

    assert seconds("h100-sxm") == pytest.approx(1e-5, rel=0.01)
    assert seconds("h200-sxm") == pytest.approx((3e-5 * 1e-5) ** 0.5, rel=0.05)
    assert seconds("h200-sxm", "2.29") == pytest.approx(1e-5, rel=0.05)
    assert seconds("h200-sxm", "2.23") == pytest.approx(3e-5, rel=0.05)


def test_in_switch_all_reduces_across_nodes_say_nothing_of_trees():
    ampere = load_cluster("dgx-a100", 16, 2)
    of_hopper = [each for each in calibrations() if each.machine == "dgx-h100"]
    estimate = one(CollectiveModel(ampere, tiers_of(of_hopper, ampere)), "all_reduce", MIB, 16, 2)
    assert "fitted_on" not in estimate.breakdown and estimate.source == "analytic"
    b200 = load_cluster("dgx-b200", 16, 2)
    borrowed = one(CollectiveModel(b200, tiers_of(of_hopper, b200)), "all_reduce", MIB, 16, 2)
    assert borrowed.breakdown["fitted_on"] == "dgx-h100"


def test_in_switch_all_reduces_say_nothing_of_rings_nor_of_switches_that_may_not_add():
    of_hopper = [each for each in calibrations() if each.machine == "dgx-h100"]
    assert {(sweep.kind, sweep.nodes) for sweep in of_hopper[0].sweeps} == {("all_reduce", 2)}
    h200 = load_cluster("dgx-h200", 16, 2)
    gather = one(CollectiveModel(h200, tiers_of(of_hopper, h200)), "all_gather", MIB, 16, 2)
    assert "fitted_on" not in gather.breakdown and gather.breakdown["algorithm"] == "ring"
    # NCCL_NVLS_ENABLE=0: the same GPUs and switches, by rings and trees.
    tcpxo = load_cluster("gcp-a3-mega", 16, 2)
    assert not tcpxo.in_switch and not can_reduce(tcpxo) and can_reduce(h200)
    reduced = one(CollectiveModel(tcpxo, tiers_of(of_hopper, tcpxo)), "all_reduce", 64 * MIB, 16, 2)
    assert "fitted_on" not in reduced.breakdown and reduced.breakdown["algorithm"] in ("ring", "tree")
    own = calibration("gcp-a3-mega", sweeps=(("2.21", "all_reduce", 16, 2, 1e-4),))
    assert not adds(own) and adds(of_hopper[0])
    assert one(CollectiveModel(tcpxo, tiers_of([own], tcpxo)), "all_reduce", MIB, 16, 2).source == "fitted"
