"""What is said about a site, from terms given by hand: times in seconds, all of them made up."""

from __future__ import annotations

import pytest

from costmodel.cpu.roofline import FusedTile, RooflineReport, RooflineStage, TensorTraffic
from costmodel.operators.layers import Conv2d, FusedConvs, Operator
from fusion.analysis.analyzer import LayerCost, explain_decision

CONV = Conv2d(1, 4, 4, 4, 4, (1, 1))


def cost(
    core: float = 0.0,
    memory: float = 0.0,
    region: float = 0.0,
    level: str = "DRAM",
    recomputation: float = 1.0,
    winograd: bool = False,
    spills: bool = False,
) -> LayerCost:
    return LayerCost(core, memory, region, recomputation, level, 3 * 2**19, winograd, spills)


def told(
    unfused: LayerCost, fused: LayerCost, seconds: tuple[float, float], chosen: bool = True, rival: str | None = None
) -> str:
    return explain_decision(unfused, fused, *seconds, chosen, rival)


# --- the sentence ----------------------------------------------------------------------------------


def test_a_gain_without_any_term_is_better_overlap():
    assert told(cost(), cost(), (2.0, 1.5)) == "25% faster fused: arithmetic and memory overlap better in one kernel"
    assert told(cost(), cost(), (2.0, 1.99)).startswith("less than 2% faster fused: ")  # which a roofline cannot tell


def test_two_hundredths_of_the_unfused_time_are_not_worth_a_word():
    """Of 2 s exactly 0.04 s either way are not told, 0.05 s are."""
    silent = "25% faster fused: arithmetic and memory overlap better in one kernel"
    assert told(cost(region=0.04), cost(core=0.04), (2.0, 1.5)) == silent
    assert told(cost(region=1.0), cost(region=1.0), (2.0, 1.5)) == silent
    assert told(cost(region=0.05), cost(core=0.05), (2.0, 1.5)) == (
        "25% faster fused: fewer parallel regions (50000.0 to 0.0 us); "
        "against it, threads share the work worse (0.0 to 50000.0 us)"
    )


# --- why arithmetic takes another time -------------------------------------------------------------


@pytest.mark.parametrize(
    ("unfused", "fused", "why"),
    [
        (cost(2), cost(4, recomputation=1.5), "the halo of the tiles re-computes 50% of the arithmetic"),
        (cost(2), cost(4, recomputation=1.01), "threads share the work worse"),
        (cost(4), cost(2, recomputation=1.5), "threads share the work better"),
        (cost(2, winograd=True), cost(4, recomputation=1.5), "apart, Winograd's algorithm saves multiplications, one "
                                                             "kernel for both computes direct sums"),
        (cost(4, winograd=True), cost(2), "threads share the work better"),
        (cost(2, winograd=True), cost(4, winograd=True), "threads share the work worse"),
        (cost(2, winograd=True), cost(4, winograd=True, spills=True),
         "tiles and weights fit no core's own cache, which Winograd's transforms go through"),
        (cost(2), cost(4, spills=True), "threads share the work worse"),
        (cost(4, winograd=True), cost(2, winograd=True, spills=True), "threads share the work better"),
    ],
)  # fmt: skip
def test_the_reason_for_another_time_of_the_arithmetic(unfused, fused, why):
    before, after = unfused.core_seconds, fused.core_seconds
    verdict = "100% slower fused: " if after > before else "50% faster fused: "
    assert told(unfused, fused, (before, after)) == f"{verdict}{why} ({before * 1e6:.1f} to {after * 1e6:.1f} us)"


# --- the terms, from the roofline ------------------------------------------------------------------


def report(
    operator: Operator, stages: list[tuple[float, float]], traffic: list[TensorTraffic], **more: object
) -> RooflineReport:
    steps = tuple(RooflineStage(*stage, 1.0) for stage in stages)
    return RooflineReport(operator, "toy", 1, steps, tuple(traffic), 0.25, **more)


def test_terms_of_kernels_that_run_one_by_one():
    """The first waits 5 - 3 s for memory, the second's arithmetic (4 s) hides its own; 0.25 s each to begin."""
    moved = [TensorTraffic("input", 10, "DRAM", 2.0), TensorTraffic("output", 64, "L3", 3.0)]
    first = report(CONV, [(3.0, 1.0)], moved, winograd_outputs=4, spills=True)
    second = report(CONV, [(1.0, 4.0)], [TensorTraffic("input", 64, "L3", 1.0)])
    assert LayerCost.of([first, second]) == LayerCost(7.0, 2.0, 0.5, 1.0, "L3", 64, winograd=True, spills=False)


def test_terms_of_one_fused_kernel():
    """3 x 2 + 1 flop for every 2 that are needed; both rows of the intermediate count."""
    tile = FusedTile(1, 4, (3.0, 1.0), 1.0, 100)
    moved = [
        TensorTraffic("intermediate", 16, "L1", 0.5),
        TensorTraffic("output", 64, "DRAM", 1.0),
        TensorTraffic("intermediate", 8, "L1", 0.5),
    ]
    fused = report(FusedConvs((CONV, CONV)), [(1.0, 0.5), (2.0, 0.5)], moved, tile=tile, spills=True)
    assert LayerCost.of([fused]) == LayerCost(3.0, 0.0, 0.25, 2.0, "L1", 24, winograd=False, spills=True)
