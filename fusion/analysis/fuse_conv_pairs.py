"""``FuseConvPairs``: a TVM pass that fuses pairs of convolutions into one kernel each.

The decision is made by the analyzer (by the roofline of a machine) or, with a database of tuning records, by
measurements. Documented in ``docs/tutorials/tvm-pipeline.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from schedules.contract.tvm_import import lacks_compiler

if lacks_compiler():
    raise ImportError(
        "FuseConvPairs needs TVM's compiler, but this process loaded a tuned model with TVM's runtime alone: import "
        "fusion.analysis.fuse_conv_pairs before the first fusion.load, or use another process"
    )

import tvm
from tvm import relax

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel
from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Operator
from fusion.analysis.analyzer import is_hopeless, network_bytes, predict_seconds
from fusion.analysis.target_machine import machine_for
from fusion.model.conv_graph import FusionPlan, Graph, Site, find_sites, select, unfused_seconds
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from schedules.contract.cpu_target import CpuTarget, host_target
from schedules.contract.template import Config
from schedules.kernels.template_table import template_for
from schedules.tuning.kernel_tuner import Ranker
from schedules.tuning.tuning_records import RECORDS, RecordStore

_log = logging.getLogger(__name__)


@tvm.transform.module_pass(opt_level=0, name="FuseConvPairs")
class FuseConvPairs:
    """Rewrites the pairs worth fusing in every Relax function; all other code is unchanged.

    A rewritten pair (or inverted residual) is a ``R.call_tir`` of a scheduled kernel on tensors of layout NCHW16c (8c
    with AVX2), between layout conversions that cancel between adjacent fused pairs. Weights must be constants
    (``relax.transform.BindParams``) and batch norms folded: run :class:`fusion.relax.Canonicalize` before. Run it
    before ``LegalizeOps``.

    - ``database``: tuning records (a directory, or an open ``RecordStore``): fuse exactly what *measured* faster than
      separate kernels, with its best configuration. Default: fuse what the cost model predicts to be faster.
    - ``machine``: a machine, or its name or file (default: this CPU, measured on first use)
    - ``cost_model``: predicts instead of that machine's roofline, and ranks configurations if it can
    - ``cpu``: target of the kernels (default: this CPU)

    Raises ``ProjectError`` for a bad machine or database.
    """

    def __init__(
        self,
        database: RecordStore | Path | str | None = None,
        machine: Machine | str | None = None,
        cpu: CpuTarget | None = None,
        cost_model: CostModel | None = None,
    ) -> None:
        # Raise user errors here: an exception inside a pass reaches its caller as a RuntimeError of TVM.
        self.cpu = cpu or host_target()
        self.store = _opened(Path(database), self.cpu) if isinstance(database, str | Path) else database
        self.machine = machine_for(machine, self.cpu.threads, _log.info) if isinstance(machine, str) else machine
        self.cost_model = cost_model

    def transform_module(self, mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        for name in [v.name_hint for v, function in mod.functions.items() if isinstance(function, relax.Function)]:
            graph = extract_graph(mod, name)
            plan = self.plan(graph)
            if plan.groups:
                configs = {operator: self._config(operator) for operator in plan.operators}
                mod = lower(mod, plan, configs, self.cpu, name, groups_only=True)
        return mod

    def plan(self, graph: Graph) -> FusionPlan:
        """Plan of the pairs to fuse, without separate nodes; each decision is logged at level INFO."""
        sites = find_sites(graph, self.cpu)
        if not sites:
            return FusionPlan(())
        tried, seconds = self._judged(sites, graph)
        chosen = select(graph, tried, seconds)
        for site in sites:
            why = _explain(site, chosen, seconds) if site in tried else "not fused: it would save nothing"
            _log.info("%s: %s", site.name, why)
        return FusionPlan(tuple(group for group in chosen.groups if group.is_fused))

    def _judged(self, sites: list[Site], graph: Graph) -> tuple[list[Site], dict[Operator, float]]:
        """Sites in question, and measured or predicted times of their kernels."""
        if self.store is not None:
            return sites, _measured(sites, self.store)
        model = self._model(graph)
        seconds = predict_seconds(sites, model)
        if not isinstance(model, RooflineModel):
            return sites, seconds
        return [site for site in sites if not is_hopeless(site, seconds, model.explain)], seconds

    def _model(self, graph: Graph) -> CostModel:
        if self.cost_model is not None:
            return self.cost_model
        machine = self.machine or machine_for(None, self.cpu.threads, _log.info)
        return RooflineModel(machine, self.cpu.threads, network_bytes(graph))

    def _config(self, operator: Operator) -> Config:
        """Best measured configuration, or the best ranked one; by default the first of the space, which is ordered
        by quality.
        """
        record = None if self.store is None else self.store.best(operator)
        if record is not None:
            return record.config
        template = template_for(operator, self.cpu)
        assert template is not None, "a site without a template"
        space = template.space(operator, self.cpu)
        ranker = self.cost_model
        return space[ranker.rank(operator, space)[0] if isinstance(ranker, Ranker) else 0]


def _opened(directory: Path, cpu: CpuTarget) -> RecordStore:
    """Open the records in ``directory``; raise ``InputError`` if it cannot contain any, as nothing would be fused."""
    if not directory.exists():
        raise InputError(
            f"{directory}: no such directory of tuning records; `python -m fusion tune` makes BUILD/records"
        )
    if (directory / "records" / RECORDS).is_file() and not (directory / RECORDS).exists():
        raise InputError(
            f"{directory}: is a build directory; its tuning records are in {directory / 'records'}; name that folder"
        )
    return RecordStore(directory, cpu)


def _measured(sites: Sequence[Site], store: RecordStore) -> dict[Operator, float]:
    """Best measured times of the sites' kernels and of those they replace, if available."""
    operators: dict[Operator, Any] = {}
    for site in sites:
        for operator in (site.operator, *(node.operator for node in site.nodes)):
            operators[operator] = store.best(operator)
    return {operator: record.seconds for operator, record in operators.items() if record is not None}


def _explain(site: Site, plan: FusionPlan, seconds: Mapping[Operator, float]) -> str:
    fused, apart = seconds.get(site.operator), unfused_seconds(site, seconds)
    if fused is None or apart is None:
        return "not fused: no records of its kernels"
    times = f"{fused * 1e6:.1f} us fused, {apart * 1e6:.1f} us apart"
    if plan.fuses(site):
        return f"fused: {times}"
    return f"not fused: {times}" if fused >= apart else f"not fused: {times}, but an overlapping site saves more"
