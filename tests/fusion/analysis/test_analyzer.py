"""The analyzer on a toy machine whose answers are mental arithmetic: peak 100 flop/s, memory 10 B/s."""

from __future__ import annotations

import json

import pytest

from costmodel.machines.machine_records import ComputeRate, Machine, MemoryLevel, ParallelRegion, PerThreads
from costmodel.operators.layers import Conv2d
from fusion.analysis.analyzer import analyze
from fusion.model.conv_graph import Graph, Node, Other
from schedules.contract.cpu_target import CpuTarget

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=1, l1_bytes=400, l2_bytes=400)


def one(value: float) -> PerThreads:
    return PerThreads(((1, value),))


def toy(cache_bytes: int = 400, peak: float = 100.0) -> Machine:
    """A private cache of 1000 B/s, of which a kernel may count on ``cache_bytes``, before a memory of 10 B/s.

    Parallel regions cost 3 s.
    """
    return Machine(
        name="toy",
        kind="cpu",
        description="",
        compute={"float32": ComputeRate(one(peak), "toy")},
        memory=(
            MemoryLevel("L1", 2 * cache_bytes, False, one(1000.0), "toy"),
            MemoryLevel("DRAM", 1e9, True, one(10.0), "toy"),
        ),
        parallel_region=ParallelRegion(one(3.0), "toy"),
    )


# 4 channels on 4x4 pixels: every activation has 256 bytes; weights have 144 and 64 bytes.
DEPTHWISE = Conv2d(1, 4, 4, 4, 4, (3, 3), padding=(1, 1, 1, 1), groups=4)
POINTWISE = Conv2d(1, 4, 4, 4, 4, (1, 1))


def pair(second: Conv2d = POINTWISE) -> Graph:
    nodes = (
        Node("dw", DEPTHWISE, "x", None, (), "dw.out", ()),
        Node("pw", second, "dw.out", None, (), "pw.out", ()),
    )
    other = Other("soft", "relax.nn.softmax", "soft.out", "no template computes it")
    return Graph(nodes, (other,), {"dw.out": 1, "pw.out": 1})


def test_memory_bound_pair_on_the_toy_machine():
    """Unfused (256+144+256)/10 + 3 + (256+64+256)/10 + 3 = 129.2 s.

    Fused with tiles of 2 rows (128 B of intermediate + 208 B of weights fit 400 B): each tile reads 3 of 4 input rows,
    so 1.5 * 256 + 208 + 256 = 848 B from memory and 2 * 256 B from the cache: 84.8 + 0.512 + 3 = 88.312 s.
    """
    (site,) = analyze(pair(), toy(), CPU).sites
    assert site.kind == "depthwise-pointwise"
    assert site.unfused_seconds == pytest.approx(129.2)
    assert site.fused_seconds == pytest.approx(88.312)
    assert site.fuse
    assert site.reason.startswith("32% faster fused: the 256 B intermediate stays in L1 instead of DRAM")
    assert site.unfused_bounds == ("memory:DRAM", "memory:DRAM")
    assert site.fused_bound == "memory:DRAM"


def test_intensities_and_levels_are_those_of_both_arms():
    """1152 + 512 flop over 656 + 576 B unfused, over 256 + 208 + 256 B fused."""
    (site,) = analyze(pair(), toy(), CPU).sites
    assert site.flops == 1664
    assert site.unfused_intensity == pytest.approx(1664 / 1232)
    assert site.fused_intensity == pytest.approx(1664 / 720)
    places = {place.tensor: (place.size_bytes, place.unfused_level, place.fused_level) for place in site.tensors}
    assert places == {
        "input": (256, "DRAM", "DRAM"),
        "weights": (208, "DRAM", "DRAM"),
        "intermediate": (256, "DRAM", "L1"),
        "output": (256, "DRAM", "DRAM"),
    }


def test_a_compute_bound_pair_gains_only_the_parallel_region():
    """At 1 flop/s the arithmetic hides all memory: 1318 s against 1315 s. Of 1152 s of the depthwise layer 800 are
    left, since 10 of 12 taps along each axis read the image; 512 s are of the 1x1.
    """
    (site,) = analyze(pair(), toy(peak=1.0), CPU).sites
    assert site.unfused_seconds == pytest.approx(1318.0)
    assert site.fused_seconds == pytest.approx(1315.0)
    assert site.unfused_bounds == ("compute", "compute")


def test_a_halo_that_costs_more_than_it_saves_is_declined():
    """Pointwise before depthwise at 1 flop/s. Tiles of 2 rows fit 100 B: 3 rows of one channel and 52 B of weights.

    They compute 3 + 3 rows of the intermediate instead of 4: 1.5 * 512 + 800 + 3 = 1571 s against 1318 s.
    """
    nodes = (
        Node("pw", POINTWISE, "x", None, (), "pw.out", ()),
        Node("dw", DEPTHWISE, "pw.out", None, (), "dw.out", ()),
    )
    (site,) = analyze(Graph(nodes, (), {"pw.out": 1, "dw.out": 1}), toy(cache_bytes=100, peak=1.0), CPU).sites
    assert site.recomputation == pytest.approx(1920 / 1664)
    assert (site.unfused_seconds, site.fused_seconds) == (pytest.approx(1318.0), pytest.approx(1571.0))
    assert not site.fuse
    assert site.reason.startswith("19% slower fused: the halo of the tiles re-computes 15% of the arithmetic")


def test_the_json_names_the_documented_fields():
    document = json.loads(json.dumps(analyze(pair(), toy(), CPU).to_json()))
    assert document["machine"] == "toy"
    assert document["others"] == [{"name": "soft", "operator": "relax.nn.softmax", "reason": "no template computes it"}]
    (site,) = document["sites"]
    assert {"name", "kind", "unfused_seconds", "fused_seconds", "fuse", "reason"} <= site.keys()
    assert site["fuse"] is True
