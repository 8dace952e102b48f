"""Pairs of dense convolutions in networks like ResNet, YOLO and U-Net: found, priced, and the hopeless left untuned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("tvm")
pytest.importorskip("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper

from costmodel.machines.machine_file import load_machine
from costmodel.operators.layers import FusedConvs
from fusion.analysis.analyzer import NOT_TUNED, NetworkAnalysis, analyze
from fusion.model.conv_graph import Graph, Site, find_sites, unfused_plan
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.tuning.network import plausible_sites
from fusion.tuning.network_tuning import TunedKernels
from fusion.tuning.summary import site_rows
from schedules.contract.cpu_target import CpuTarget

CPU = CpuTarget(16, 32, "skylake-avx512", (), 2, 48 * 1024, 2 * 1024**2)
MACHINE = load_machine("xeon-amx-2c")


class Onnx:
    """Layers added one after the other to an ONNX graph; each method returns the name of its output."""

    def __init__(self, channels: int, size: int) -> None:
        self.nodes: list = []
        self.weights: list = []
        self.channels = {"x": channels}
        self.shape = [1, channels, size, size]

    def add(self, operator: str, inputs: list[str], channels: int, **attributes) -> str:
        name = f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        self.channels[name] = channels
        return name

    def conv(self, x: str, channels: int, kernel: int = 1, stride: int = 1, relu: bool = True) -> str:
        weight = np.full((channels, self.channels[x], kernel, kernel), 0.01, np.float32)
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(weight, name))
        pads = [kernel // 2] * 4
        y = self.add("Conv", [x, name], channels, strides=[stride] * 2, pads=pads, kernel_shape=[kernel] * 2)
        return self.add("Relu", [y], channels) if relu else y

    def graph(self, path: Path, *outputs: str) -> Graph:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self.shape)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
            self.weights,
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
        return extract_graph(import_onnx(path).mod)


def kinds(graph: Graph) -> list[str]:
    return [site.kind for site in find_sites(graph, CPU)]


def bottleneck(net: Onnx, x: str, middle: int, stride: int = 1) -> str:
    y = net.conv(net.conv(net.conv(x, middle), middle, 3, stride), 4 * middle, relu=False)
    skip = net.conv(x, 4 * middle, 1, stride, relu=False)
    return net.add("Relu", [net.add("Add", [y, skip], 4 * middle)], 4 * middle)


def test_bottlenecks_of_a_resnet(tmp_path):
    """1x1 -> 3x3 and 3x3 -> 1x1, the latter with the residual; what both branches read begins no site."""
    net = Onnx(16, 14)
    y = bottleneck(net, bottleneck(net, "x", 16), 32, stride=2)
    found = find_sites(net.graph(tmp_path / "m.onnx", y), CPU)
    assert [site.kind for site in found] == ["pointwise-conv", "conv-pointwise"] * 2
    assert [site.operator.epilogue.residual is not None for site in found] == [False, True] * 2


def test_basic_blocks_of_a_resnet(tmp_path):
    net = Onnx(16, 14)
    y = net.conv(net.conv("x", 16, 3), 16, 3, relu=False)
    y = net.add("Relu", [net.add("Add", [y, "x"], 16)], 16)
    (site,) = find_sites(net.graph(tmp_path / "m.onnx", y), CPU)
    assert site.kind == "conv-conv" and site.operator.epilogue.residual == "before_activation"


def yolo(path: Path, size: int = 32, width: int = 16) -> Graph:
    """Two stems of stride 2, then a block whose halves are split and joined."""
    net = Onnx(3, size)
    y = net.conv(net.conv("x", width, 3, 2), 2 * width, 3, 2)
    y = net.conv(y, 2 * width)
    left = net.conv(net.conv(y, width), width, 3)
    y = net.add("Concat", [y, left], 3 * width, axis=1)
    return net.graph(path, net.conv(net.conv(y, 2 * width), width, 3, 2))


def test_stems_and_blocks_of_a_yolo(tmp_path):
    found = kinds(yolo(tmp_path / "m.onnx"))
    assert found == ["conv-conv", "conv-pointwise", "pointwise-conv", "pointwise-conv"]


def test_double_convolutions_of_a_u_net(tmp_path):
    """What the skip connection reads ends its site."""
    net = Onnx(16, 16)
    skip = net.conv(net.conv("x", 16, 3), 16, 3)
    y = net.add("MaxPool", [skip], 16, kernel_shape=[2, 2], strides=[2, 2])
    y = net.conv(net.conv(y, 32, 3), 32, 3)
    graph = net.graph(tmp_path / "m.onnx", net.conv(y, 16), skip)
    assert kinds(graph) == ["conv-conv", "conv-conv", "conv-pointwise"]


def job(sites: list[Site], analysis: NetworkAnalysis, minutes: float | None) -> SimpleNamespace:
    return SimpleNamespace(sites=sites, analysis=analysis, request=SimpleNamespace(minutes=minutes))


@pytest.mark.parametrize("minutes", [None, 5.0])
def test_what_cannot_win_is_not_tuned_and_says_why(tmp_path, minutes):
    """A basic block of 512 channels, whose weights every step would read again: listed with the reason."""
    net = Onnx(512, 7)
    graph = net.graph(tmp_path / "m.onnx", net.conv(net.conv("x", 512, 3), 512, 3))
    sites, analysis = find_sites(graph, CPU), analyze(graph, MACHINE, CPU)
    (report,) = analysis.sites
    assert report.hopeless and not report.fuse
    assert report.fused_seconds > 1.15 * report.unfused_seconds
    assert "slower fused" in report.reason and report.reason.endswith(NOT_TUNED)
    assert plausible_sites(job(sites, analysis, minutes)) == []
    assert "fit no core's own cache" in report.reason or "saves multiplications" in report.reason
    apart = unfused_plan(graph)
    (row,) = site_rows(analysis, sites, TunedKernels({}, {}, None, (), 0, 0, False), apart, apart)
    assert row["decision"] == f"kept apart: {report.reason}"


def test_what_may_win_is_tuned(tmp_path):
    """The stems of a YOLO at 640x640: few channels, no Winograd's algorithm at stride 2, 6.6 MB in between."""
    graph = yolo(tmp_path / "m.onnx", 640)
    sites, analysis = find_sites(graph, CPU), analyze(graph, MACHINE, CPU)
    stems = analysis.sites[0]
    assert stems.kind == "conv-conv" and not stems.hopeless and stems.fused_seconds < stems.unfused_seconds
    assert any(report.fuse for report in analysis.sites[:2])  # either stem with the other, or with what follows
    places = {place.tensor: place for place in stems.tensors}
    assert places["intermediate"].size_bytes == 4 * 16 * 320 * 320
    assert (places["intermediate"].unfused_level, places["intermediate"].fused_level) == ("L3", "L2")
    assert stems.fused_intensity > 2 * stems.unfused_intensity
    assert sites[0] in plausible_sites(job(sites, analysis, None))


def test_every_site_of_another_kind_is_tuned_without_a_time_limit(tmp_path):
    """However clearly it is predicted to lose."""
    net = Onnx(16, 14)
    graph = net.graph(tmp_path / "m.onnx", net.conv(net.conv("x", 32), 16))
    sites, analysis = find_sites(graph, CPU), analyze(graph, MACHINE, CPU)
    (report,) = analysis.sites
    assert report.kind == "pointwise-pointwise" and isinstance(sites[0].operator, FusedConvs)
    slow = SimpleNamespace(sites=[SimpleNamespace(hopeless=report.hopeless, loses_clearly=True)])
    assert plausible_sites(job(sites, slow, None)) == sites
    assert plausible_sites(job(sites, slow, 5.0)) == []
