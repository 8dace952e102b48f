"""A new chain is one file and one call: a template that nothing else knows is found, tuned, chosen and lowered."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("tvm")
from costmodel.cost_model import Estimate
from costmodel.cpu.learned_residual import ResidualModel
from fusion.model.conv_graph import Graph, find_sites
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from fusion.tuning.network_tuning import NetworkTuner, TunedKernels, TuningBudget
from schedules.kernels import template_table as templates
from schedules.kernels.template_table import config_terms, template_for
from schedules.tuning.tuning_records import RecordStore
from tests.fusion.fake_runner import FakeRunner
from tests.fusion.relax_models import CPU, assert_close, inputs_of, kernel_names, module, stock
from tests.fusion.two_pointwise import TwoPointwise

MODULE = module((1, 24, 9, 7), lambda net, x: net.relu6(net.conv(net.relu6(net.conv(x, 40)), 20)))


class OneMicrosecond:
    def estimate(self, operators):
        return [Estimate(1e-6, 0.0, 1.0, "compute")] * len(operators)


@pytest.fixture(autouse=True)
def without_own_pair(monkeypatch):
    """The project's own template of this chain makes way for the toy."""
    others = [template for template in templates.TEMPLATES if template.family != TwoPointwise.family]
    monkeypatch.setattr(templates, "TEMPLATES", others)


def seconds(operator) -> float:
    return 3e-6 if hasattr(operator, "convs") else 2e-6


def tuned(directory: Path, graph: Graph, runner: FakeRunner) -> TunedKernels:
    model = ResidualModel(OneMicrosecond(), config_terms=partial(config_terms, cpu=CPU))
    with RecordStore(directory, CPU) as store:
        tuner = NetworkTuner(graph, find_sites(graph, CPU), store, CPU, model, runner, lambda state, network: None)
        return tuner.tune(TuningBudget(trials=12))


def test_without_its_call_the_chain_is_no_site():
    assert find_sites(extract_graph(MODULE), CPU) == []


def test_a_registered_template_is_found_tuned_chosen_and_lowered(tmp_path):
    templates.register(TwoPointwise())
    graph = extract_graph(MODULE)
    (site,) = find_sites(graph, CPU)
    template = template_for(site.operator, CPU)
    assert isinstance(template, TwoPointwise) and site.kind == "pointwise-pointwise"
    space = template.space(site.operator, CPU)
    costs = [template.cost(site.operator, config, CPU) for config in space]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    runner = FakeRunner(seconds)
    first = tuned(tmp_path, graph, runner)
    assert runner.measured.count(site.operator) == 12 and not first.unsolved
    config = first.chosen_configs()[site.operator]
    assert config in space and template.work_split(config, CPU) == "pixels"
    plan = first.plan(graph, [site])
    assert [group.operator for group in plan.groups] == [site.operator]
    # Its records are those of any other kernel: a second run measures nothing.
    again = FakeRunner(seconds)
    assert tuned(tmp_path, graph, again).chosen_configs() == first.chosen_configs() and not again.measured
    result = lower(MODULE, plan, first.chosen_configs(), CPU)
    assert sum(name.startswith("pointwise_pointwise") for name in kernel_names(result)) == 1
    arrays = inputs_of(MODULE)
    assert_close(build_executable(result, CPU)(*arrays), stock(MODULE, arrays))
