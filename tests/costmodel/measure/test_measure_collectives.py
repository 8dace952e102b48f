from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys

import pytest

from costmodel.collectives.sweep_logs import read_own_table
from costmodel.commands.cli import main
from costmodel.measure.collective_suite import KINDS, RankGroup, cases, groups_of, sendable
from costmodel.operators.any_operator import from_record
from costmodel.operators.collective_transfer import CollectiveTransfer

pytest.importorskip("torch")


def test_groups_of_one_node_and_of_several():
    assert [(each.ranks, each.nodes) for each in groups_of(8, 8)] == [
        ((0, 1), 1),
        ((0, 1, 2, 3), 1),
        (tuple(range(8)), 1),
    ]
    assert [(len(each.ranks), each.nodes) for each in groups_of(12, 6)] == [(2, 1), (4, 1), (6, 1), (12, 2), (2, 2)]
    assert groups_of(12, 6)[-1].ranks == (0, 6)  # one rank of each node


def test_every_kind_and_size_once_the_range_first():
    listed = [transfer for transfer, _ in cases(groups_of(4, 4), "bfloat16", 1 << 20)]
    assert len(listed) == len(set(listed))
    assert {each.kind for each in listed} == set(KINDS)
    assert {each.ranks for each in listed if each.kind == "send_recv"} == {2}
    sizes = [each.size_bytes for each in listed if each.kind == "all_reduce" and each.ranks == 2]
    assert sorted(sizes) == [2.0**power for power in range(9, 21)] and sizes[:3] == [512, 2048, 8192]
    gathered = {each.size_bytes * each.ranks for each in listed if each.kind == "all_gather"}
    assert gathered == {2.0**power for power in range(9, 21)}  # the whole buffer is a power of two


def test_sizes_that_ranks_cannot_divide_are_rounded_down_or_left_out():
    assert sendable(CollectiveTransfer("reduce_scatter", 520, 8), "bfloat16").size_bytes == 512
    assert sendable(CollectiveTransfer("all_to_all", 8, 8), "bfloat16") is None
    assert RankGroup((0, 4), 2).nodes == 2


def test_outside_torchrun_the_command_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    assert main(["measure", "--suite", "collectives", "--device", "cpu", "-o", str(tmp_path)]) == 2
    assert "torchrun --nproc-per-node N" in capsys.readouterr().err


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """What two ranks over gloo measure in a few seconds."""
    directory = tmp_path_factory.mktemp("suite")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "costmodel", "measure", "--suite", "collectives", "--device", "cpu"]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    common |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*command, "-o", str(directory), "--minutes", "0.05"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    messages = [each.communicate(timeout=120)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], messages
    return directory


def test_two_ranks_measure_every_kind(table):
    with (table / "collectives.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows and not any(row["error"] for row in rows)
    kinds = {from_record(json.loads(row["operator"])).kind for row in rows}
    assert kinds >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert all(float(row["minimum_s"]) <= float(row["median_s"]) for row in rows)
    origin = json.loads((table / "collectives.json").read_text())["runs"][0]
    assert (origin["ranks"], origin["ranks_per_node"]) == (2, 2)


def test_its_table_is_calibration_input(table, user_machines):
    assert all(row.transfer.ranks == 2 for row in read_own_table(table / "collectives.csv"))
    assert main(["fit", "--nccl-log", str(table / "collectives.csv"), "--machine", "l4"]) == 0
    assert (user_machines / "calibration" / "l4-node" / "collectives.json").exists()
