"""Quality of the ranking of kernels before any measurement, on networks left out of the training:
``lab.validate.ranking``.

For every network the ranking is trained without all operators that occur in it, and orders the measured configurations
of each of them. Four methods show the contribution of each part: a random order, the templates' analytic cost (issue
slots and cache traffic), trees without that cost, and trees over it, which is the method of a tuning run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from costmodel.base.errors import Say
from costmodel.cost_model import Config, ConfigKey, config_key
from costmodel.cpu.learned_residual import ResidualModel, train_together
from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_file import read_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Operator
from lab.command_line import program, run
from lab.records import records_here
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.template_table import config_terms, template_for
from schedules.tuning.shipped_records import MACHINE_FILE, CpuRecords, KernelRecords

METHODS = ("random", "analytic", "trees", "both")
# Fewest configurations of a kernel for which an order is meaningful.
LEAST_CONFIGURATIONS = 8
# Number of random orders that are averaged.
_RANDOM_ORDERS = 20


@dataclass(frozen=True)
class RankedKernel:
    """Figures of one method on one kernel."""

    network: str
    family: str
    dtype: str
    method: str
    seconds: float
    # Whether the first, or one of the first five, is the fastest.
    top1: float
    top5: float
    # Spearman's, of the order and the times.
    correlation: float
    # Relative excess of the time of the first, or the best of five, over the fastest (0.1: 10 %).
    loss1: float
    loss5: float


@dataclass(frozen=True)
class RankingRow:
    """Means over ``kernels`` of one method; ``latency_loss``: of the times of all first choices together."""

    group: str
    method: str
    kernels: int
    top1: float
    top5: float
    correlation: float
    loss1: float
    loss5: float
    latency_loss: float


def evaluate_ranking(content: CpuRecords, machine: Machine, say: Say = lambda _: None) -> list[RankedKernel]:
    """Evaluate every method on every kernel of every network, with that network left out of the training."""
    found = []
    terms = _Terms()
    for network in content.networks:
        say(f"leaving out {network}")
        rest = content.without(network)
        kernels = [kernel for kernel in content.kernels if network in kernel.networks and _tells(kernel, content)]
        trained = {
            method: _trained(rest, machine, with_cost, terms)
            for method, with_cost in (("trees", False), ("both", True))
            if rest.kernels
        }
        for kernel in kernels:
            for method in METHODS:
                found.append(_ranked(network, kernel, method, content, trained, terms))
    return found


def summed_up(kernels: Sequence[RankedKernel], group: str) -> list[RankingRow]:
    """A row per method. ``group``: common property of the kernels."""
    rows = []
    for method in METHODS:
        ours = [kernel for kernel in kernels if kernel.method == method]
        if ours:
            best = sum(kernel.seconds for kernel in ours)
            chosen = sum(kernel.seconds * (1 + kernel.loss1) for kernel in ours)
            columns = ("top1", "top5", "correlation", "loss1", "loss5")
            means = {name: float(np.mean([getattr(kernel, name) for kernel in ours])) for name in columns}
            rows.append(RankingRow(group, method, len(ours), **means, latency_loss=chosen / best - 1))
    return rows


def report(kernels: Sequence[RankedKernel]) -> list[RankingRow]:
    """Rows for all kernels, then by dtype, by family of kernels and by network."""
    rows = summed_up(kernels, "all")
    for name in ("dtype", "family", "network"):
        for value in sorted({getattr(kernel, name) for kernel in kernels}):
            rows += summed_up([kernel for kernel in kernels if getattr(kernel, name) == value], value)
    return rows


def _tells(kernel: KernelRecords, content: CpuRecords) -> bool:
    covered = template_for(kernel.operator, content.cpu.target(kernel.threads)) is not None
    return covered and len(kernel.records) >= LEAST_CONFIGURATIONS


class _Terms:
    """:func:`config_terms` of every measured configuration, cached: nearly all are used for every network left out."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Operator], dict[ConfigKey, np.ndarray]] = {}

    def __call__(self, operator: Operator, configs: Sequence[Config], cpu: CpuTarget) -> np.ndarray:
        known = self._known.setdefault((cpu.threads, operator), {})
        new = [config for config in configs if config_key(config) not in known]
        known.update(zip(map(config_key, new), config_terms(operator, new, cpu), strict=True))
        return np.array([known[config_key(config)] for config in configs])


def _trained(content: CpuRecords, machine: Machine, with_cost: bool, terms: _Terms) -> Mapping[int, ResidualModel]:
    """A ranking per number of threads, all with the same trees."""
    models = {}
    for threads in sorted({kernel.threads for kernel in content.kernels}):
        model = _empty(content, machine, threads, with_cost, terms)
        for kernel in content.of(threads).values():
            if template_for(kernel.operator, content.cpu.target(threads)) is not None:
                model.update(kernel.measurements)
        models[threads] = model
    trees = train_together(list(models.values()))
    served = {threads: _empty(content, machine, threads, with_cost, terms) for threads in models}
    for model in served.values():
        model.install(trees)
    return served


def _empty(content: CpuRecords, machine: Machine, threads: int, with_cost: bool, terms: _Terms) -> ResidualModel:
    own = partial(terms, cpu=content.cpu.target(threads)) if with_cost else None
    return ResidualModel(RooflineModel(machine, threads), config_terms=own)


def _ranked(
    network: str,
    kernel: KernelRecords,
    method: str,
    content: CpuRecords,
    trained: Mapping[str, Mapping[int, ResidualModel]],
    terms: _Terms,
) -> RankedKernel:
    cpu = content.cpu.target(kernel.threads)
    template = template_for(kernel.operator, cpu)
    assert template is not None, "kernels without a template are not ranked"
    configs = [record.config for record in kernel.records]
    times = np.array([record.seconds for record in kernel.records])
    model = trained.get(method, {}).get(kernel.threads)
    if method == "random":
        scores = [np.random.default_rng(seed).random(len(times)) for seed in range(_RANDOM_ORDERS)]
    elif model is not None and model.knows(kernel.operator):
        scores = [model.scores(kernel.operator, configs)]
    else:  # fallback of a tuning run
        scores = [terms(kernel.operator, configs, cpu)[:, 0]]
    figures = np.mean([_figures(each, times) for each in scores], axis=0)
    dtype = kernel.operator.dtype
    return RankedKernel(network, template.family, dtype, method, float(times.min()), *map(float, figures))


def _figures(scores: np.ndarray, times: np.ndarray) -> tuple[float, float, float, float, float]:
    """Figures of :class:`RankedKernel` from ``top1`` on."""
    order = np.argsort(scores, kind="stable")
    fastest = int(np.argmin(times))
    first, five = times[order[0]], times[order[:5]].min()
    least = times.min()
    return (
        float(order[0] == fastest),
        float(fastest in order[:5]),
        spearman(scores, times),
        float(first / least - 1),
        float(five / least - 1),
    )


def spearman(scores: np.ndarray, times: np.ndarray) -> float:
    """Rank correlation, with mean ranks for ties; 0 if all scores, or all times, are equal."""
    from scipy.stats import rankdata

    first, second = rankdata(scores), rankdata(times)
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def ranking_command(
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder of all CPUs' records; default: that of the package, or $FUSION_RECORDS."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Leave out one network after the other: recall, rank correlation and loss of latency on its kernels."""
    found = records_here(directory)
    machine = read_machine(found.directory / MACHINE_FILE)
    rows = report(evaluate_ranking(found.content, machine, lambda line: print(line, file=sys.stderr)))
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print("| kernels of | | method | top-1 | top-5 | rank correlation | loss of 1 | of 5 | of all together |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        shares = f"{row.top1:.0%} | {row.top5:.0%} | {row.correlation:.2f} | {row.loss1:.1%} | {row.loss5:.1%}"
        print(f"| {row.group} | {row.kernels} | {row.method} | {shares} | {row.latency_loss:.1%} |")


if __name__ == "__main__":
    sys.exit(run(program(ranking_command), "lab.validate.ranking"))
