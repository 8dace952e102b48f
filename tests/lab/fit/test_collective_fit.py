from __future__ import annotations

import json

import numpy as np
import pytest

from costmodel.collectives.calibration import DIRECTORY, NAME, read_calibration
from costmodel.collectives.own_cluster import MeasuredRow, calibrate, held_out_ranks, held_out_sizes
from costmodel.collectives.physics import FILE, analyse, constants
from costmodel.collectives.sweep_logs import CollectiveRow, whole_buffer
from costmodel.operators.collective_transfer import CollectiveTransfer
from lab.data.collective_sweeps import read_collectives
from lab.data.data_folder import data_folder
from lab.data.selection import selection_of
from lab.fit.collectives import by_machine, constants_of, fit_collectives, rows_of
from lab.validate.cost_models import HELD_OUT_RANKS, HELD_OUT_SIZES, validate_collectives

DATA = data_folder()
needs_data = pytest.mark.skipif(not (DATA / "vtrain").exists(), reason="the public measurements are not here")


def invented(kinds=("all_reduce", "all_gather"), counts=(2, 4, 8), scale=1.3, nccl="2.99") -> MeasuredRow:
    """Rows of a DGX H100 that runs ``scale`` times as long as the analytic model says."""
    cluster = MeasuredRow("dgx-h100", (CollectiveRow(CollectiveTransfer("all_reduce", 1, 8), 1.0),)).cluster
    rows = []
    for kind in kinds:
        for ranks in counts:
            for power in range(9, 30):
                transfer = whole_buffer(kind, 2.0**power, ranks)
                rows.append(CollectiveRow(transfer, scale * analyse(transfer, cluster).seconds, nccl))
    return MeasuredRow("dgx-h100", tuple(rows))


def errors(predictions):
    return np.array([each.estimate.seconds / each.row.seconds - 1 for each in predictions])


def test_a_machine_of_the_analytic_kind_is_met_on_sizes_and_ranks_left_out():
    measured = invented()
    sizes, ranks = held_out_sizes(measured), held_out_ranks(measured)
    assert len(sizes) == 2 * 3 * 19 and {each.row.transfer.ranks for each in ranks} == {4}
    assert np.abs(errors(sizes)).mean() < 0.02 and np.abs(errors(ranks)).mean() < 0.03


def test_a_prediction_has_not_seen_its_row():
    rows = list(invented().rows)
    place = next(i for i, row in enumerate(rows) if row.transfer == whole_buffer("all_gather", 2.0**20, 4))
    rows[place] = CollectiveRow(rows[place].transfer, 100 * rows[place].seconds, rows[place].nccl)
    spoiled = MeasuredRow("dgx-h100", tuple(rows))
    for predictions in (held_out_sizes(spoiled), held_out_ranks(spoiled)):
        error = next(each for each in predictions if each.row is rows[place])
        assert error.estimate.seconds < 0.02 * error.row.seconds


def test_versions_do_not_stand_in_for_one_another():
    old = invented(kinds=("all_reduce",), scale=4.0, nccl="2.1")
    both = MeasuredRow("dgx-h100", (*invented(kinds=("all_reduce",)).rows, *old.rows))
    assert np.abs(errors(held_out_sizes(both))).mean() < 0.02
    assert [sweep.nccl for sweep in calibrate(both, {}).sweeps] == ["2.1"] * 3 + ["2.99"] * 3


def test_margins_come_from_what_was_left_out():
    margins = calibrate(invented(), {}).margins["all_reduce"]
    assert 0 < margins.size <= margins.ranks < 0.1
    alone = calibrate(invented(counts=(8,)), {}).margins["all_reduce"]
    assert alone.ranks == pytest.approx(0.2)  # nothing left out says how ranks behave


def test_constants_are_found_again():
    fitted, truth = constants_of([invented(scale=1.0)]), constants()
    cluster = invented().cluster
    for transfer in (whole_buffer("all_reduce", 2.0**power, 8) for power in range(9, 30, 4)):
        assert analyse(transfer, cluster, fitted).seconds == pytest.approx(
            analyse(transfer, cluster, truth).seconds, 0.05
        )


@needs_data
def test_units_of_the_public_sweeps():
    """Bandwidths that the hardware has: a wrong unit or buffer would be off by the number of ranks at least."""
    best: dict[str, float] = {}
    for machine, tables in by_machine(read_collectives(DATA)).items():
        for row in rows_of(tables):
            if row.transfer.kind != "send_recv":
                best[machine] = max(best.get(machine, 0), row.transfer.wire_bytes / row.seconds)
    assert best["h100-sxm"] == pytest.approx(445e9, rel=0.05)  # added by the switches: more than NVLink's 360 GB/s
    assert best["a100-sxm-80gb"] == pytest.approx(230e9, rel=0.05) and best["v100-sxm2-32gb"] == pytest.approx(
        135e9, 0.05
    )
    assert best["l40s"] == pytest.approx(22e9, rel=0.1) and best["a100-pairwise"] == pytest.approx(197e9, rel=0.05)


@needs_data
def test_the_shipped_files_are_what_fit_writes(tmp_path):
    chosen = selection_of("collectives", DATA)
    chosen.require()
    for path in fit_collectives(DATA, tmp_path, lambda line: None, chosen.wants):
        found, shipped = (json.loads(each.read_text()) for each in (path, DIRECTORY / path.relative_to(tmp_path)))
        # Shipped files name the command by which they were made, before there was a laboratory.
        assert found["provenance"].pop("command") and shipped["provenance"].pop("command")
        assert_near(found, shipped, str(path.relative_to(tmp_path)))
    assert FILE.exists()


def assert_near(found, shipped, place):
    """Alike but for the last of four written digits, in which one CPU's sums differ from another's."""
    if isinstance(shipped, float) and isinstance(found, float | int):
        assert found == pytest.approx(shipped, rel=5e-3, abs=1e-12), place
    elif isinstance(shipped, dict):
        assert isinstance(found, dict) and found.keys() == shipped.keys(), place
        for name, value in shipped.items():
            assert_near(found[name], value, f"{place}/{name}")
    elif isinstance(shipped, list):
        assert isinstance(found, list) and len(found) == len(shipped), place
        for index, value in enumerate(shipped):
            assert_near(found[index], value, f"{place}/{index}")
    else:
        assert found == shipped, place


def test_shipped_files_say_where_they_come_from():
    paths = sorted(DIRECTORY.glob(f"*/{NAME}"))
    assert len(paths) >= 6
    for path in paths:
        calibration = read_calibration(path)
        assert calibration.machine == path.parent.name
        named = {**calibration.provenance.get("tables", {}), **calibration.provenance.get("own", {})}
        assert named and all(each["rows"] > 0 and len(each["sha256"]) == 64 for each in named.values())


GOALS = {"from 1 MiB": 0.08, "below 1 MiB": 0.20}


@needs_data
def test_goals_on_sizes_and_ranks_left_out():
    named = selection_of("collectives", DATA).wants
    results = [
        each
        for each in validate_collectives(DATA, (HELD_OUT_SIZES, HELD_OUT_RANKS), named)
        if "all kinds" in each.family
    ]
    assert {each.split for each in results} == {HELD_OUT_SIZES, HELD_OUT_RANKS} and len(results) > 10
    for each in results:
        size = each.family.removeprefix("all kinds, ")
        assert each.accuracy.mape <= GOALS[size], (each.split, each.family, each.machine, each.accuracy)
