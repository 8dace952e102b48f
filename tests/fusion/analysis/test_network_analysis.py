"""What an analysis says of a whole network, by the toy machine and by models whose answers are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from costmodel.base.errors import InputError, MachineError
from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_file import write_machine
from costmodel.machines.machine_records import ComputeRate, Machine
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs
from fusion.analysis.analyzer import (
    NOT_TUNED,
    WORTH_OF_GAINS,
    SiteReport,
    TensorPlace,
    analyze,
    analyze_in,
    by_precision,
    is_hopeless,
    read_graph,
)
from fusion.model.conv_graph import Graph, Node, Site
from schedules.contract.cpu_target import CpuTarget
from tests.fusion.analysis.test_analyzer import CPU, DEPTHWISE, POINTWISE, one, pair, toy

# With kernels for bfloat16 and for int8.
NARROW = replace(CPU, mcpu="cooperlake", features=("avx512_bf16", "avx512_vnni"))
DENSE = Conv2d(1, 4, 4, 4, 4, (3, 3), padding=(1, 1, 1, 1))


def rated(*dtypes: str) -> Machine:
    """The toy machine with 200 flop/s in each of ``dtypes`` too."""
    machine = toy()
    return replace(machine, compute={**machine.compute, **dict.fromkeys(dtypes, ComputeRate(one(200.0), "toy"))})


def chain(*convs: Conv2d) -> Graph:
    """Convolutions one after another, called ``0``, ``1`` and so on."""
    nodes = tuple(Node(str(at), conv, f"{at}.in", None, (), f"{at + 1}.in", ()) for at, conv in enumerate(convs))
    return Graph(nodes, (), {node.output: 1 for node in nodes})


class Given(CostModel):
    """``seconds`` for every operator, ``fused`` for one kernel of several convolutions; remembers what it was asked."""

    def __init__(self, seconds: float, fused: float) -> None:
        self.each, self.fused = seconds, fused
        self.asked: list = []

    def estimate(self, operators):
        self.asked += operators
        times = [self.fused if isinstance(operator, FusedConvs) else self.each for operator in operators]
        return [Estimate(time, time, time, "given", {}, "analytic") for time in times]


# --- one site --------------------------------------------------------------------------------------


def test_the_residual_is_placed_and_counted():
    """4 x 4 x 4 values of 4 bytes more that the kernels read, apart as well as fused."""
    adds = replace(POINTWISE, epilogue=Epilogue(residual="before_activation"))
    (site,) = analyze(pair(adds), toy(), CPU).sites
    assert site.tensors == (
        TensorPlace("input", 256, "DRAM", "DRAM"),
        TensorPlace("weights", 208, "DRAM", "DRAM"),
        TensorPlace("intermediate", 256, "DRAM", "L1"),
        TensorPlace("residual", 256, "DRAM", "DRAM"),
        TensorPlace("output", 256, "DRAM", "DRAM"),
    )
    flops = 1152 + 512 + 64  # and an addition for each value
    assert site.unfused_intensity == pytest.approx(site.flops / (1232 + 256))
    assert site.flops in (1664, flops)


@pytest.mark.parametrize(("fused", "clearly"), [(1.15, False), (1.16, True), (0.5, False)])
def test_a_site_loses_clearly_beyond_fifteen_percent(fused, clearly):
    found = SiteReport("a", "k", (), 1, 1.0, 1.0, (), 1.0, 1.0, fused, (), "", False, "")
    assert found.loses_clearly is clearly


# --- the network -----------------------------------------------------------------------------------


def test_weights_are_found_again_as_far_away_as_the_network_is_large():
    """The pair alone fits 800 B; with six more layers of 320 B in between, its weights are back in memory."""
    (alone,) = analyze(pair(), toy(cache_bytes=800), CPU).sites
    nodes = (*pair().nodes, *(Node(f"n{at}", POINTWISE, f"q{at}", None, (), f"r{at}", ()) for at in range(6)))
    (among,) = analyze(Graph(nodes, (), {"dw.out": 1, "pw.out": 1}), toy(cache_bytes=800), CPU).sites
    levels = [{place.tensor: place.unfused_level for place in site.tensors} for site in (alone, among)]
    assert [each["weights"] for each in levels] == ["L1", "DRAM"]
    assert [each["input"] for each in levels] == ["L1", "L1"]


def test_another_model_predicts_the_seconds_and_the_roofline_says_why():
    model = Given(2.0, 3.0)
    (site,) = analyze(pair(), toy(), CPU, model).sites
    assert (site.unfused_seconds, site.fused_seconds, site.fuse) == (4.0, 3.0, True)
    assert site.fused_bound == "memory:DRAM"
    (slower,) = analyze(pair(), toy(), CPU, Given(2.0, 5.0)).sites
    assert (slower.fused_seconds, slower.fuse) == (5.0, False)


def site_of(nodes: tuple[Node, ...]) -> Site:
    operator = FusedConvs(tuple(node.operator for node in nodes))
    return Site("+".join(node.name for node in nodes), operator.kind, nodes, operator)


@pytest.mark.parametrize(
    ("fused", "fused_serial", "hopeless"),
    [
        (2.0, 6.0, True),
        (1.97, 5.9, True),
        (1.96, 6.0, False),  # saves two hundredths where memory and arithmetic overlap
        (2.0, 5.88, False),  # or where they do not
        (1.0, 1.0, False),
    ],
)
def test_a_pair_of_dense_convolutions_that_saves_nothing_either_way_is_hopeless(fused, fused_serial, hopeless):
    """Apart 1 s each, 3 s without overlap."""
    site = site_of(chain(DENSE, DENSE).nodes)
    seconds = {DENSE: 1.0, site.operator: fused}
    serial = {DENSE: 3.0, site.operator: fused_serial}
    assert is_hopeless(site, seconds, lambda operator: SimpleNamespace(serial_seconds=serial[operator])) is hopeless


def test_sites_of_other_kinds_are_never_hopeless():
    site = site_of(pair().nodes)
    slow = {DEPTHWISE: 1.0, POINTWISE: 1.0, site.operator: 100.0}
    assert not is_hopeless(site, slow, lambda operator: SimpleNamespace(serial_seconds=slow[operator]))


class ByOperator(CostModel):
    """A second each, but for what is told."""

    def __init__(self, seconds: dict) -> None:
        self.seconds = seconds

    def estimate(self, operators):
        times = [self.seconds.get(operator, 1.0) for operator in operators]
        return [Estimate(time, time, time, "given", {}, "analytic") for time in times]


def test_what_is_hopeless_is_not_chosen_and_says_why_and_nothing_else():
    """Three layers of 1 s. The first pair saves less than a hundredth of its time, and nothing by the roofline; the
    second pair, which overlaps it, is chosen.
    """
    first, second = FusedConvs((DENSE, DENSE)), FusedConvs((DENSE, POINTWISE))
    model = ByOperator({first: 1.99, second: 1.0})
    found = {site.name: site for site in analyze(chain(DENSE, DENSE, POINTWISE), toy(4), CPU, model).sites}
    assert (found["1+2"].fuse, found["1+2"].hopeless) == (True, False)
    assert (found["0+1"].fuse, found["0+1"].hopeless) == (False, True)
    assert found["0+1"].reason.endswith(f"; {NOT_TUNED}") and "overlaps" not in found["0+1"].reason
    assert NOT_TUNED not in found["1+2"].reason


def test_sites_that_overlap_the_chosen_one_name_it():
    """The block saves 1.1 of 3 s; either pair would save 0.1 of 2 s."""
    sites = analyze(chain(POINTWISE, DEPTHWISE, POINTWISE), toy(), CPU, Given(1.0, 1.9)).sites
    reasons = {site.name: site.reason for site in sites}
    assert [site.name for site in sites if site.fuse] == ["0+1+2"]
    for name in ("0+1", "1+2"):
        assert reasons[name].startswith("5% faster fused: ")
        assert reasons[name].endswith("; but it overlaps 0+1+2, which saves more over the whole chain")
    assert "overlaps" not in reasons["0+1+2"]


# --- precisions ------------------------------------------------------------------------------------


def test_layers_are_analysed_in_the_precision_asked_for():
    """Half the bytes, twice the rate: half the time but for the 3 s that a parallel region takes."""
    machine = rated("bfloat16")
    whole, half = (analyze_in(each, pair(), machine, NARROW) for each in ("float32", "bfloat16"))
    assert (whole.precision, half.precision) == ("float32", "bfloat16")
    assert [each.precision for each in whole.precisions] == ["float32", "bfloat16"]
    assert half.precisions == whole.precisions
    (one_site,), (other,) = whole.sites, half.sites
    sizes = [{place.tensor: place.size_bytes for place in site.tensors} for site in (one_site, other)]
    assert sizes[1] == {tensor: size / 2 for tensor, size in sizes[0].items()}
    assert whole.sites == analyze(pair(), machine, NARROW).sites


def test_a_gain_that_is_promised_comes_with_what_such_promises_were_worth():
    for machine, cpu in ((toy(), CPU), (rated("bfloat16"), NARROW)):
        for found in by_precision(pair(), machine, cpu, notes=("a note",)):
            promised = any(site.fuse for site in found.sites)
            assert found.notes == (("a note", WORTH_OF_GAINS) if promised else ("a note",))


def test_a_quantised_network_is_analysed_as_its_file_says():
    graph = pair(replace(POINTWISE, dtype="int8"))
    graph = replace(graph, nodes=tuple(replace(n, operator=replace(n.operator, dtype="int8")) for n in graph.nodes))
    machine = rated("bfloat16", "int8")
    found = analyze_in("float32", graph, machine, NARROW)
    assert (found.precision, found.precisions) == ("int8", ())
    (only,) = by_precision(graph, machine, NARROW)
    assert (only.precision, only.sites) == ("int8", found.sites)


def test_every_precision_with_a_rate_and_kernels():
    def precisions(machine: Machine, cpu: CpuTarget) -> list[str]:
        return [each.precision for each in by_precision(pair(), machine, cpu)]

    assert precisions(rated("bfloat16", "int8"), NARROW) == ["float32", "bfloat16", "int8"]
    assert precisions(rated("int8"), NARROW) == ["float32", "int8"]
    assert precisions(rated("bfloat16", "int8"), CPU) == ["float32"]
    half = by_precision(pair(), rated("bfloat16"), NARROW)[1]
    assert half.sites == analyze_in("bfloat16", pair(), rated("bfloat16"), NARROW).sites


# --- files -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``pair.onnx``, a depthwise 3x3 and a 1x1 on 8x8 pixels and any batch, and ``toy.yaml``."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    folder = tmp_path_factory.mktemp("analysis")
    weights = {"a": np.ones((16, 1, 3, 3), np.float32), "b": np.ones((32, 16, 1, 1), np.float32)}
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["y"], name="dw", group=16, pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["y", "b"], ["z"], name="pw"),
    ]
    graph = helper.make_graph(
        nodes,
        "pair",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 16, 8, 8])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "pair.onnx")
    write_machine(replace(rated("bfloat16"), description="for tests"), folder / "toy.yaml")
    return folder


def unheard(line: str) -> None:
    raise AssertionError(line)


def test_a_file_is_read_for_a_batch_or_shapes_and_a_machine(files: Path):
    machine = str(files / "toy.yaml")
    by_batch = read_graph(files / "pair.onnx", {}, machine, 1, unheard, batch=3)
    by_shape = read_graph(files / "pair.onnx", {"x": (3, 16, 8, 8)}, machine, 1, unheard)
    for read in (by_batch, by_shape):
        assert [node.operator.output_shape for node in read.graph.nodes] == [(3, 16, 8, 8), (3, 32, 8, 8)]
        assert (read.machine.name, read.cpu.threads) == ("toy", 1)
    found = analyze_in("float32", *by_batch)
    assert (found.kernels, found.threads, found.sites[0].layers[0].input_shape) == (2, 1, (3, 16, 8, 8))


def test_what_a_file_cannot_be_analysed_for_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fusion.analysis.target_machine.host_target", lambda threads: replace(CPU, threads=threads))
    words = (files / "pair.onnx", {}, str(files / "toy.yaml"))
    with pytest.raises(InputError, match=r"^--precision bfloat16: bfloat16 needs .*; choose --precision float32$"):
        read_graph(*words, 1, unheard, 1, "bfloat16")
    with pytest.raises(MachineError, match="toy"):
        analyze_in("float32", *read_graph(*words, 7, unheard, 1))
