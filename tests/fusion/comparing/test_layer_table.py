"""Profiles of two engines joined by the ONNX graph: made-up ones, whose sums are mental arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fusion.comparing import layer_table as asked
from fusion.comparing.engine import LayerTime, Unavailable
from fusion.comparing.layer_table import LayerTable, graph_node, join_layers, lost_layers
from fusion.comparing.onnx_runtime import node_times

# /a/Conv -> /a/Relu -> /b/Conv -> /Add (with /a/Relu) -> pool -> Gemm without a name
NODES = [
    graph_node("/a/Conv", "Conv", ["x", "wa"], ["a0"], 0),
    graph_node("/a/Relu", "Relu", ["a0"], ["a1"], 1),
    graph_node("/b/Conv", "Conv", ["a1", "wb"], ["b0"], 2),
    graph_node("/Add", "Add", ["b0", "a1"], ["s"], 3),
    graph_node("/pool", "GlobalAveragePool", ["s"], ["p"], 4),
    graph_node("", "Gemm", ["p", "wc"], ["y"], 5),
]


def kernel(names: str, microseconds: float, name: str = "") -> LayerTime:
    return LayerTime(tuple(names.split()), microseconds, name or names)


# Ours are called by what they write: activations are inside.
OURS = [kernel("a_Relu", 10), kernel("Add", 20), kernel("pool", 2), kernel("y", 3)]


def joined(theirs: list[LayerTime], ours: list[LayerTime] = OURS) -> LayerTable:
    """Networks that take what their layers do: nothing is scaled."""
    sums = [sum(each.seconds for each in side) for side in (ours, theirs)]
    return join_layers("peer", NODES, ours, theirs, *sums)


def found(table: LayerTable) -> dict[str, tuple[float | None, float | None]]:
    return {" ".join(row.layers): (row.ours_seconds, row.theirs_seconds) for row in table.rows}


def test_kernels_of_the_same_nodes_are_beside_each_other_what_loses_most_first():
    table = joined([kernel("/a/Conv /a/Relu", 11), kernel("/b/Conv /Add", 14), kernel("/pool", 1), kernel("Gemm_5", 3)])
    assert found(table) == {"/b/Conv /Add": (20, 14), "/pool": (2, 1), "y": (3, 3), "/a/Conv /a/Relu": (10, 11)}
    assert [row.lost_seconds for row in table.rows] == [6, 1, 0, -1]
    assert (table.lost_seconds, table.gained_seconds) == (7, 1)
    assert table.others.ours_seconds is None and table.others.theirs_seconds is None


def test_a_kernel_that_one_side_fuses_further_joins_the_rows_of_the_other():
    """The peer computes the second convolution and the pooling in one kernel; ours has two."""
    table = joined([kernel("/a/Conv", 11), kernel("/b/Conv /pool", 14), kernel("y", 3)])
    assert found(table)["/b/Conv /Add /pool"] == (22, 14)
    ours = [kernel("pool", 30), kernel("y", 3)]  # and here ours fuses more than the peer
    table = joined([kernel("a0", 5), kernel("/b/Conv", 14), kernel("/pool", 4), kernel("y", 3)], ours)
    assert found(table)["/a/Conv /b/Conv /a/Relu /Add /pool"] == (30, 23)


def test_an_activation_of_ours_that_no_kernel_of_theirs_is_called_by_is_in_the_one_before_it():
    ours = [kernel("a_Conv", 9), kernel("a_Relu", 1), *OURS[1:]]
    table = joined([kernel("a0", 5), kernel("/b/Conv", 14), kernel("/pool", 4), kernel("y", 3)], ours)
    assert found(table)["/a/Conv /a/Relu"] == (10, 5)


def test_a_layer_that_one_side_lacks_has_a_row_and_what_has_no_node_is_one_line():
    ours = [*OURS[:3], kernel("blocked", 4, "to_blocked"), kernel("plain", 1, "to_plain")]
    table = joined([kernel("/a/Conv", 10), kernel("", 7, "Reorder"), kernel("unknown", 1), kernel("y", 3)], ours)
    rows = found(table)
    assert rows["/b/Conv /Add /pool"] == (22, None)  # a product: it is not taken for a part of another
    assert rows["y"] == (None, 3)
    assert (table.others.ours_seconds, table.others.theirs_seconds, table.others.lost_seconds) == (5, 8, -3)
    assert table.others.ours_kernels == ("to_blocked", "to_plain")
    sums = table.ours_network_seconds - table.theirs_network_seconds
    assert sum(row.lost_seconds for row in (*table.rows, table.others)) == sums
    assert table.lost_seconds - table.gained_seconds == sums
    json.dumps(asdict(table), allow_nan=False)


def test_layers_are_scaled_to_what_the_network_takes():
    theirs = [kernel("/a/Conv", 8), kernel("/b/Conv", 8)]
    table = join_layers("peer", NODES, OURS, theirs, ours_network_seconds=70, theirs_network_seconds=8)
    assert found(table)["/a/Conv /a/Relu"] == (20, 4)
    assert (table.ours_profiled_seconds, table.theirs_profiled_seconds) == (35, 16)
    assert sum(row.lost_seconds for row in (*table.rows, table.others)) == 62


def test_variables_derived_from_a_node_are_of_that_node():
    ours = [kernel("a_Relu_sums", 1), kernel("a_Relu", 9), *OURS[1:]]
    assert found(joined([kernel("a0", 5)], ours))["/a/Conv /a/Relu"] == (10, 5)


def test_events_of_onnx_runtime_become_nodes():
    def events(durations: dict[str, int]) -> list[dict]:
        return [
            {"cat": "Node", "name": f"{name}_kernel_time", "dur": dur, "args": {"op_name": "Conv"}}
            for name, dur in durations.items()
        ]

    session = [{"cat": "Session", "name": "model_run", "dur": 99, "args": {}}]
    warm = events({"a_nchwc": 900, "b_token_3": 900, "twice": 900}) + events({"twice": 900})
    run = events({"a_nchwc": 5, "b_token_3": 7, "twice": 1}) + events({"twice": 2})
    found = node_times([*session, *(3 * warm), *(4 * run)], 7, {"a_nchwc": ("reorder", "a_out")})
    assert [each.names for each in found] == [("a", "reorder", "a_out"), ("b",), ("twice",)]
    assert [each.seconds for each in found] == pytest.approx([5e-6, 7e-6, 3e-6])


class Engine:
    """A worker; ``layers``: what it tells, or raises."""

    def __init__(self, layers: list[LayerTime] | Exception) -> None:
        self._layers, self.asked = layers, 0

    def layers(self, inputs: object, seconds: float) -> list[LayerTime]:
        self.asked += 1
        if isinstance(self._layers, Exception):
            raise self._layers
        return self._layers


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "read_nodes", lambda path: NODES)


def test_nothing_is_profiled_where_nothing_is_lost_unless_it_is_asked_for(graph: None):
    ours, peer = Engine(OURS), Engine([kernel("a0", 50)])
    assert lost_layers(Path("m"), {}, (ours, 35), {"peer": (peer, 50)}).table is None
    assert (ours.asked, peer.asked) == (0, 0)
    table = lost_layers(Path("m"), {}, (ours, 35), {"peer": (peer, 50)}, asked=True).table
    assert table is not None and table.engine == "peer"


def test_the_fastest_peer_that_tells_its_layers_is_compared_and_the_others_are_named(graph: None):
    silent, slow = Engine(Unavailable("it tells no times of layers")), Engine(OURS)
    peers = {"slow": (slow, 50), "near": (Engine([kernel("a0", 30)]), 30), "silent": (silent, 20)}
    found = lost_layers(Path("m"), {}, (Engine(OURS), 35), peers)
    assert found.table is not None and found.table.engine == "near" and slow.asked == 0
    assert found.missing == ("no times of the layers of silent: it tells no times of layers",)
    found = lost_layers(Path("m"), {}, (Engine(Unavailable("tune again")), 35), peers)
    assert found.table is None and found.missing == ("no times of our layers: tune again",)
