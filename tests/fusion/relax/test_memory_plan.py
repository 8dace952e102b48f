"""Bytes of a planned module against networks whose memory is mental arithmetic."""

# ruff: noqa: E402

from __future__ import annotations

import pytest

tvm = pytest.importorskip("tvm")
from tvm.relax import op

from fusion.model.conv_graph import cover, find_sites
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import MemoryPlan, build_executable
from fusion.tuning.network import complete_configs
from schedules.tuning.kernel_ranking import KernelGuesses
from tests.fusion.relax_models import CPU, module

SIZE = 12
TENSOR = 4 * 32 * SIZE * SIZE  # bytes of 32 channels of FP32: whole blocks on every CPU


def planned(mod: tvm.IRModule, *kinds: str) -> MemoryPlan:
    """Of the network with the sites of these kinds fused."""
    graph = extract_graph(mod)
    plan = cover(graph, [site for site in find_sites(graph, CPU) if site.kind in kinds])
    assert sum(group.is_fused for group in plan.groups) == len(kinds)
    memory = build_executable(lower(mod, plan, complete_configs(plan, KernelGuesses(CPU), {}), CPU), CPU).memory
    assert memory is not None
    return memory


@pytest.fixture(scope="module")
def residual() -> tvm.IRModule:
    """1x1 -> depthwise -> 1x1, the output of the first added to that of the last: all 32 channels on 12x12."""

    def body(net, x):
        first = net.relu6(net.conv(x, 32))
        return net(op.add(net.conv(net.relu6(net.depthwise(first)), 32), first))

    return module((1, 32, SIZE, SIZE), body)


def test_fusing_lowers_the_peak_by_the_middle_tensor(residual):
    """While the last 1x1 runs there are the first's output, which is added, the middle tensor, and its own output."""
    apart, fused = planned(residual), planned(residual, "depthwise-pointwise")
    # And the output as the framework has it. The blocked input's storage is one of the three.
    assert apart.activation_bytes == 4 * TENSOR
    assert fused.activation_bytes == apart.activation_bytes - TENSOR


def test_tile_buffers_and_weights_are_told_apart(residual):
    """The fused kernel keeps rows of the middle tensor for each thread, the separate ones nothing but registers."""
    apart, fused = planned(residual), planned(residual, "depthwise-pointwise")
    weights = 4 * (32 * 32 + 32 + 32 * 9 + 32 + 32 * 32 + 32)
    assert apart.weight_bytes == fused.weight_bytes == weights
    assert apart.scratch_bytes == 0
    assert 0 < fused.scratch_bytes < CPU.threads * TENSOR and fused.scratch_bytes % CPU.threads == 0
