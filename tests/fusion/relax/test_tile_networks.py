"""Networks whose products are computed in the tile registers of AMX: lowered, linked, and exact by the emulation."""

# ruff: noqa: E402
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
pytest.importorskip("ml_dtypes")
from fusion.model.conv_graph import BFLOAT16, find_sites, layers_covered, select, stored_in, unfused_plan
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import KernelObjects, build_executable
from schedules.contract.cpu_target import flags_of_mcpu, target_with
from schedules.kernels.template_table import template_for
from tests.fusion.bfloat16_models import whole_numbers
from tests.fusion.relax.test_lower_precision import Whole
from tests.fusion.relax_models import CPU as HOST
from tests.fusion.relax_models import kernel_names, module, stock

CPU = target_with(flags_of_mcpu("sapphirerapids"), 2, 48 * 1024, 2**21, "sapphirerapids")


def network(net, x):
    """Products of every kind, and pairs with a depthwise layer between and behind them."""
    whole = Whole(net)
    x = whole.small(whole.conv(x, 40, 1, "pointwise"))
    x = whole.small(whole.conv(whole.small(whole.conv(x, 40, 3, "filter", groups=40)), 24, 1, "project"))
    return whole.conv(x, 33, 3, "window", strides=(2, 2))


def lowered(mod, fused: str | None):
    """In tiles wherever there is such a kernel; ``fused``: the kind of pairs that are."""
    graph = extract_graph(mod)
    graph = stored_in(graph, layers_covered(graph, BFLOAT16, CPU), BFLOAT16)
    plan = unfused_plan(graph)
    if fused is not None:
        sites = [site for site in find_sites(graph, CPU) if site.operator.kind == fused]
        seconds = {node.operator: 1.0 for node in graph.nodes} | {site.operator: 0.1 for site in sites}
        plan = select(graph, sites, seconds)
    configs = {}
    for operator in plan.operators:
        space = template_for(operator, CPU).space(operator, CPU)
        configs[operator] = next((config for config in space if "tile_rows" in config), space[0])
    return lower(mod, plan, configs, CPU)


@pytest.mark.parametrize("fused", [None, "depthwise-pointwise", "pointwise-depthwise"])
def test_a_network_in_tiles_is_exact(fused: str | None):
    mod = module((1, 32, 12, 10), network)
    made = lowered(mod, fused)
    tiles = [name for name in kernel_names(made) if name.startswith("tile_")]
    assert len(tiles) == 3, kernel_names(made)
    assert fused is None or any(name.startswith(f"tile_{fused.replace('-', '_')}") for name in tiles)
    arrays = whole_numbers(mod)
    found = build_executable(made, replace(CPU, mcpu=HOST.mcpu), emulated=True)(*arrays)
    for actual, expected in zip(found, stock(mod, arrays), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_its_library_asks_for_the_tiles_once(tmp_path: Path):
    made = lowered(module((1, 32, 12, 10), network), fused="depthwise-pointwise")
    build_executable(made, CPU, KernelObjects(tmp_path / "kernels", CPU)).export_library(tmp_path / "model.so")
    assert (tmp_path / "model.so").read_bytes().count(b"needs the tile registers of AMX") == 1
