from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.collectives.calibration import CollectiveSweep, Curve, between_curves, smooth_knots


def test_knots_of_data_that_rise_are_the_data():
    assert smooth_knots([1, 2, 4, 8], [1.0, 1.5, 2.0, 7.0]) == ((1.0, 2.0, 4.0, 8.0), (1.0, 1.5, 2.0, 7.0))


def test_repetitions_give_their_median_and_a_spike_goes():
    sizes = [1, 2, 4, 8, 16] * 3
    seconds = [1.0, 9.0, 1.2, 1.3, 2.0] * 2 + [5.0, 9.0, 1.2, 1.3, 2.0]
    assert smooth_knots(sizes, seconds)[1][0] == 1.0
    assert max(smooth_knots(sizes, seconds)[1][:-1]) < 1.4


def test_falling_times_are_levelled():
    _, times = smooth_knots([1, 2, 3, 4], [1.0, 1.0, 4.0, 3.0])
    assert list(times) == sorted(times)


def test_dense_sweeps_keep_few_knots():
    sizes = np.arange(1, 1001) * 1e6
    known, times = smooth_knots(sizes, 5e-5 + sizes / 1e11)
    assert len(known) <= 24
    curve = Curve(2, 1, tuple(size / 1e11 for size in known), times, 1e-6, 2e-6)
    for size in (3e6, 5.5e7, 9e8):
        assert curve.latency + curve.excess(size / 1e11) == pytest.approx(5e-5 + size / 1e11, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((), ()),
        ((1.0,), ()),
        ((1.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((0.0,), (1.0,)),
        ((1.0,), (math.inf,)),
    ],
)
def test_what_is_no_curve_is_refused(sizes, seconds):
    with pytest.raises(ValueError):
        CollectiveSweep("", "all_reduce", 2, 1, sizes, seconds)


def line(ranks: int, latency: float, rate: float, nodes: int = 1) -> Curve:
    """latency + rate * ideal, measured from 1e-6 to 1e-2 ideal seconds; analytic start 1 s per rank."""
    ideal = np.geomspace(1e-6, 1e-2, 30)
    return Curve(ranks, nodes, tuple(ideal), tuple(latency + rate * ideal), float(ranks), float(ranks) * (1 + 1e-9))


def test_a_curve_goes_through_its_knots_and_beyond():
    curve = line(2, 1e-5, 2.0)
    for ideal in (1e-6, 1e-5, 1e-2):
        assert curve.latency + curve.excess(ideal) == pytest.approx(1e-5 + 2 * ideal, rel=0.01)
    assert curve.excess(1.0) == pytest.approx(2.0, rel=0.01)  # in proportion to the size
    assert curve.excess(0.0) == 0.0
    assert curve.holds(1e-3) and not curve.holds(1.0)


def test_between_ranks_latency_by_the_analytic_start_and_rates_geometrically():
    curves = [line(2, 2e-5, 1.0), line(8, 8e-5, 4.0)]
    assert between_curves(curves, 4, 1, 4.0, 0.0) == pytest.approx(4e-5, rel=0.05)
    assert between_curves(curves, 4, 1, 4.0, 10.0) == pytest.approx(20.0, rel=0.01)  # sqrt(1 x 4)
    assert between_curves(curves, 16, 1, 16.0, 0.0) == pytest.approx(16e-5, rel=0.05)
    assert between_curves(curves, 16, 1, 16.0, 10.0) == pytest.approx(40.0, rel=0.01)


def test_a_slow_protocol_is_not_carried_over_to_sizes_at_which_it_is_no_longer_used():
    """Twice as slow up to 1e-3 ideal seconds among 8 GPUs, which reach an eighth of the links' rate; 4 reach half."""
    ideal = np.geomspace(1e-6, 1.0, 200)
    slow = Curve(8, 1, tuple(ideal), tuple(np.maximum(ideal, np.minimum(2 * ideal, 2e-3))), 1.0, 1e9, usable=1 / 8)
    fast = Curve(2, 1, tuple(ideal), tuple(ideal), 1.0, 1e9)
    assert between_curves([fast, slow], 8, 1, 1.0, 8e-4, 1 / 8) == pytest.approx(2 * 8e-4, rel=0.01)
    # 8e-4 ideal seconds of 4 GPUs are as many bytes as 32e-4 of 8: the protocol has changed by then.
    assert between_curves([fast, slow], 4, 1, 1.0, 8e-4, 1 / 2) == pytest.approx(8e-4, rel=0.01)
    assert between_curves([fast, slow], 4, 1, 1.0, 2e-4, 1 / 2) == pytest.approx(2**0.5 * 2e-4, rel=0.01)
    # Links that NCCL knows of: equal seconds are equal bytes.
    known = dataclasses.replace(slow, usable=1.0)
    assert between_curves([fast, known], 4, 1, 1.0, 8e-4) == pytest.approx(2**0.5 * 8e-4, rel=0.01)


def test_across_nodes_a_curve_of_one_node_adds_what_the_network_adds():
    curve = line(8, 8e-5, 1.0)
    assert between_curves([curve], 8, 2, 8.0 + 1e-5, 0.0) == pytest.approx(curve.latency + 1e-5)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, -3)), min_size=1, max_size=20),
    st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, -3)), min_size=1, max_size=20),
    st.integers(2, 64),
    st.floats(0.01, 1),
    st.floats(-8, 2),
    st.floats(1e-9, 3),
)
def test_never_less_time_for_more_bytes_whatever_was_measured(low, high, ranks, usable, place, step):
    curves = []
    for count, points in ((2, low), (8, high)):
        knots = smooth_knots([10**size for size, _ in points], [10**time for _, time in points])
        curves.append(Curve(count, 1, *knots, 1e-6 * count, 2e-6 * count, 1 / count))
    first = between_curves(curves, ranks, 1, 1e-6 * ranks, 10**place, usable)
    assert between_curves(curves, ranks, 1, 1e-6 * ranks, 10 ** (place + step), usable) >= first * (1 - 1e-9)
    near = between_curves(curves, ranks, 1, 1e-6 * ranks, 10**place * (1 + 1e-9), usable)
    assert near == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(("first", "latency"), [(1.0001e-5, 2e-5), (1e-4, 1e-5 * 2**0.1), (1e-3, 5e-5)])
def test_a_first_size_of_many_bytes_says_little_of_the_latency(first, latency):
    """Twice the analytic time was measured: of the smallest message that is twice the latency, of many bytes it is not.
    Of the last, the latency is taken for a twentieth of the analytic time at least.
    """
    curve = Curve(2, 1, (1e-4, 1e-2), (2 * first, 0.1), 1e-5, first)
    assert curve.latency == pytest.approx(latency, rel=0.06)
    assert curve.latency + curve.excess(1e-4) == pytest.approx(2 * first)
