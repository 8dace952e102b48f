"""Lowers small modules and compares them with stock TVM; shared by the tests of what lowering makes of them."""

from __future__ import annotations

import random

from tvm import relax

from fusion.model.conv_graph import FusionPlan, find_sites, select, unfused_plan
from fusion.relax.canonical.canonicalize import canonicalize
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.template_table import template_for
from tests.fusion.relax_models import CPU, assert_close, inputs_of, kernel_names, stock


def plan_of(mod, fused: bool) -> FusionPlan:
    """Every node alone, or as many as possible fused."""
    graph = extract_graph(mod)
    if not fused:
        return unfused_plan(graph)
    sites = find_sites(graph, CPU)
    seconds = {node.operator: 1.0 for node in graph.nodes} | {site.operator: 0.1 for site in sites}
    return select(graph, sites, seconds)


def configs_of(plan: FusionPlan, seed: int = 0):
    """A random legal configuration of every operator."""
    return configs_for(plan, CPU, seed)


def configs_for(plan: FusionPlan, cpu: CpuTarget, seed: int = 0):
    """The same for another CPU."""
    generator = random.Random(seed)
    return {operator: generator.choice(template_for(operator, cpu).space(operator, cpu)) for operator in plan.operators}


def lowered(mod, fused: bool = False, seed: int = 0, **options):
    plan = plan_of(mod, fused)
    return lower(mod, plan, configs_of(plan, seed), CPU, **options)


def check(mod, fused: bool = False, seed: int = 0) -> list[str]:
    """Compares the lowered module with stock TVM; returns the kernels it calls."""
    result = lowered(mod, fused, seed)
    relax.analysis.well_formed(result)
    arrays = inputs_of(mod)
    assert_close(build_executable(result, CPU)(*arrays), stock(mod, arrays))
    return kernel_names(result)


def conversions(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(("to_blocked", "to_plain"))]


def check_canonical(mod) -> list[str]:
    """Likewise of the module in canonical form, against the module as it is."""
    result = lowered(canonicalize(mod))
    relax.analysis.well_formed(result)
    arrays = inputs_of(mod)
    assert_close(build_executable(result, CPU)(*arrays), stock(mod, arrays))
    return kernel_names(result)
