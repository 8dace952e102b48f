"""Tables of seconds over sizes that rise along every axis."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.gpu.families.gemm import TensorGemm
from costmodel.gpu.residual import Lattice, axes_of, fit_monotone, lattice_from_record, lattice_to_record
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Gemm
from lab.fit.transfer import KernelRows, disturbed

AXES = axes_of((1, 2, 8, 64), (32, 128, 4096))


def lattice(seed):
    return Lattice(AXES, fit_monotone(np.exp(np.random.default_rng(seed).normal(-9, 1, (4, 3)))))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.floats(1, 500), st.floats(1, 9000), st.floats(1, 4), st.floats(1, 4))
def test_seconds_rise_with_every_size_within_and_beyond(seed, m, n, more_m, more_n):
    found = lattice(seed).at(np.array([[m, n], [m * more_m, n * more_n]]))
    assert found[1] >= found[0] * (1 - 1e-12)


def test_work_traffic_and_a_fixed_cost_are_met_between_the_points():
    def cost(sizes):
        return 3e-6 + 2e-9 * sizes[:, 0] + 1e-9 * sizes[:, 1] + 5e-11 * sizes[:, 0] * sizes[:, 1]

    points = Lattice(AXES, np.ones((4, 3))).points()
    between = np.array([[1.5, 77.0], [5.0, 4000.0], [50.0, 33.0]])
    assert Lattice(AXES, cost(points).reshape(4, 3)).at(between) == pytest.approx(cost(between))


def test_beyond_the_last_point_its_rate_holds():
    known = lattice(0)
    assert known.at(np.array([[640.0, 4096.0]]))[0] == pytest.approx(10 * known.seconds[-1, -1])


def test_one_row_out_of_line_moves_to_the_middle_of_its_neighbours():
    assert fit_monotone(np.array([1.0, 4.0, 2.0, 8.0])) == pytest.approx([1.0, np.sqrt(8), np.sqrt(8), 8.0])


def test_it_survives_json_and_refuses_nonsense():
    known = lattice(3)
    record = json.loads(json.dumps(lattice_to_record(known)))
    assert lattice_from_record(record).seconds == pytest.approx(known.seconds, rel=1e-4)
    for wrong in ({"axes": [[1, 1, 8, 64], [32, 128, 4096]]}, {"axes": [[1, 2], [32, 128]]}):
        with pytest.raises(ValueError, match="of a lattice"):
            lattice_from_record({**record, **wrong})


def test_a_row_slower_than_its_twins_is_disturbed_and_a_level_between_the_two_is_not():
    family, sizes = TensorGemm(), (2048, 4096, 8192)
    operators = tuple(Gemm(1, m, n, k, "bfloat16", transpose_b=True) for m in sizes for n in sizes for k in sizes)
    h100, h200 = load_machine("h100-sxm"), load_machine("h200-sxm")
    splits = np.full(len(operators), "fit")
    there, here = (family.analyse(operators, each).seconds for each in (h200, h100))
    slowed = here * 1.3
    slowed[5] *= 1.5
    rows, twin = (
        KernelRows(family, machine, operators, seconds, splits) for machine, seconds in ((h100, slowed), (h200, there))
    )
    assert np.flatnonzero(disturbed(rows, [twin])).tolist() == [5]
    assert not disturbed(twin, [rows]).any()
