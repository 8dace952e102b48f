"""Reports of a plan: the cheapest setting with the flags to start it, the frontier, a page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from costmodel.base.units import format_quantity
from costmodel.pages.charts import PALETTE, inline_chart, set_logarithmic, set_tip
from costmodel.pages.document import render, write_page
from e2e.serving.serving_answer import deployment_of
from e2e.serving.serving_plan import PlanRow, ServingPlan


def plan_record(plan: ServingPlan) -> dict[str, Any]:
    """The document of ``--json``."""
    best = plan.best
    return {
        "request": plan.request.to_json(),
        "best": None if best is None else {**best.to_json(), "command": start_command(best)},
        "frontier": [each.to_json() for each in plan.frontier],
        "settings": [each.to_json() for each in plan.rows],
        "refused": plan.refused,
        "stopped": plan.stopped,
    }


def plan_text(plan: ServingPlan) -> str:
    """Lines of text."""
    best, lines = plan.best, []
    if best is None:
        lines.append(f"{_targets(plan)}: no setting holds this with probability {plan.request.probability:g}")
    else:
        lines += [f"cheapest for {_targets(plan)}:", *_table(plan, [best])]
        lines.append(f"start each copy with: {start_command(best)}")
    first = {row.request.gpu: row for row in reversed(plan.rows) if row.copies}
    others = [row for row in plan.rows if row is not best and row is first.get(row.request.gpu)]
    if others:
        lines += ["", "cheapest of the other GPUs:", *_table(plan, others)]
    lines += ["", "frontier of throughput per GPU against the speed of one user:"]
    lines += _table(plan, plan.frontier)
    if plan.refused:
        lines += ["", f"{len(plan.refused)} deployments are not possible, such as {plan.refused[0]}"]
    return "\n".join(lines)


def _targets(plan: ServingPlan) -> str:
    asked = plan.request
    load = f"{asked.rate:g} requests/s" if asked.rate else f"{asked.concurrency:,} users"
    targets = {"TTFT": asked.ttft, "TPOT": asked.tpot}
    return ", ".join([load, *(f"{name} {format_quantity(value, 's', 3)}" for name, value in targets.items() if value)])


def _columns(plan: ServingPlan) -> tuple[str, ...]:
    held = "" if plan.request.percentile == "mean" else f" {plan.request.percentile}"
    return ("GPUs", "engine", "parallel", "precision", "users", f"TTFT{held}", f"TPOT{held}", "tokens/s/user",
            "tokens/s/GPU", "sure", "in all")  # fmt: skip


def _cells(plan: ServingPlan, row: PlanRow) -> tuple[str, ...]:
    asked, served, held = row.request, row.served, plan.request.percentile
    found = "" if row.total_gpus is None else f"{row.copies} x {row.gpus} = {row.total_gpus}"
    return (
        f"{row.gpus} x {asked.gpu}", asked.engine,
        ", ".join(filter(None, (asked.parallel, asked.disaggregate, asked.speculate))), asked.precision or "as stored",
        f"{row.users:,}", format_quantity(served.ttft_seconds[held], "s", 3),
        format_quantity(served.tpot_seconds[held], "s", 3),
        f"{served.tokens_per_second_per_user:.1f}", f"{served.output_tokens_per_second_per_gpu:,.0f}",
        f"{row.probability:.0%}", found if row.per_hour is None else f"{found}, {row.per_hour:.2f}/h",
    )  # fmt: skip


def _table(plan: ServingPlan, rows: Sequence[PlanRow]) -> list[str]:
    listed = [_columns(plan), *(_cells(plan, row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]


def start_command(row: PlanRow) -> str:
    """The command that starts one copy of ``row``, as ``engines.yaml`` has it."""
    from jinja2 import Template

    asked, deployment = row.request, deployment_of(row.request)
    precision = deployment.precision
    words = Template(deployment.engine.start).render(
        model=asked.model or str(asked.model_config.parent if asked.model_config else ""),
        way=deployment.parallel,
        engine=deployment.engine,
        draft=deployment.speculation,
        own_draft="draft=" not in asked.speculate,
        apart=asked.disaggregate,
        casts=precision.weights.startswith("fp8") and not deployment.model.stored,
        cache8=precision.kv == "fp8",
        longest=asked.input_length + asked.output_length,
    )
    return " ".join(words.split())


def write_plan_page(plan: ServingPlan, path: Path) -> None:
    """Write the page; ``OutputError`` if it cannot be written."""
    best, title = plan.best, f"Serving {plan.request.model or plan.request.model_config}"
    page = render(
        "e2e.serving/plan.html",
        title=title,
        answer="No setting holds the targets." if best is None else ", ".join(_cells(plan, best)),
        command="" if best is None else start_command(best),
        question=_targets(plan),
        frontier=inline_chart("Throughput per GPU against the speed of one user", lambda axes: _draw(axes, plan), 5.0),
        columns=_columns(plan),
        surpassing=[_cells(plan, each) for each in plan.frontier],
        settings=[_cells(plan, each) for each in plan.rows],
        refused=[(each,) for each in plan.refused],
    )
    write_page(path, page)


def _draw(axes: Any, plan: ServingPlan) -> None:
    gpus = dict.fromkeys(row.request.gpu for row in plan.rows)
    for gpu, colour in zip(gpus, cycle(PALETTE), strict=False):
        rows = [row for row in plan.rows if row.request.gpu == gpu]
        for row in rows:
            (dot,) = axes.plot(*row.place, ".", color=colour, alpha=0.5)
            set_tip(dot, ", ".join(_cells(plan, row)))
        best = ServingPlan(plan.request, rows).frontier
        axes.plot(*zip(*(row.place for row in best), strict=True), color=colour, label=gpu)
    if plan.best:
        axes.plot(*plan.best.place, "D", color="none", markeredgecolor="#777777", markersize=12, label="the cheapest")
    set_logarithmic(axes, "xy")
    axes.set(xlabel="tokens/s of one user", ylabel="output tokens/s per GPU")
    axes.legend()
