"""Small modules lowered with layers in bfloat16, also on a CPU without its instructions; for tests of precision."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusion.model.conv_graph import (
    BFLOAT16,
    FusionPlan,
    Graph,
    find_sites,
    layers_covered,
    select,
    stored_in,
    unfused_plan,
)
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from tests.fusion.lowered_models import configs_for
from tests.fusion.relax_models import CPU as HOST
from tests.fusion.relax_models import inputs_of, kernel_names

# Where this CPU has no instructions for bfloat16, kernels are made for one that has, and run with a slow emulation.
EMULATED = HOST.lacks(BFLOAT16) is not None
CPU = (
    replace(HOST, lanes=16, registers=32, mcpu="cooperlake", features=(*HOST.features, "avx512_bf16"))
    if EMULATED
    else HOST
)


def rounded_graph(mod, keep=()) -> Graph:
    """Every layer that can be in bfloat16, but those whose names contain one of ``keep``."""
    graph = extract_graph(mod)
    names = {name for name in layers_covered(graph, BFLOAT16, CPU) if not any(part in name for part in keep)}
    return stored_in(graph, names, BFLOAT16)


def plan_of(graph: Graph, fused: bool) -> FusionPlan:
    """Every node alone, or as many as possible fused."""
    if not fused:
        return unfused_plan(graph)
    sites = find_sites(graph, CPU)
    seconds = {node.operator: 1.0 for node in graph.nodes} | {site.operator: 0.1 for site in sites}
    return select(graph, sites, seconds)


def lowered(mod, fused: bool = False, keep=(), seed: int = 0):
    plan = plan_of(rounded_graph(mod, keep), fused)
    return lower(mod, plan, configs_for(plan, CPU, seed), CPU)


def compiled(lowered_module):
    """Machine code that this CPU runs."""
    return build_executable(lowered_module, replace(CPU, mcpu=HOST.mcpu), emulated=EMULATED)


def whole_numbers(mod, seed: int = 1) -> list[np.ndarray]:
    """Inputs of small whole numbers: networks that compute such alone are exact in bfloat16."""
    return [np.round(array).astype(np.float32) for array in inputs_of(mod, seed)]


def casts(mod) -> list[str]:
    """The conversions of number types by themselves."""
    return [name for name in kernel_names(mod) if name == "relax.astype"]
