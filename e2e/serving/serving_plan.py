"""The cheapest way to serve a model within latency targets: GPUs, their number, parallelism, engine, precision, batch.

Every setting is a deployment (GPU, number, engine, parallelism, precision) with a limit of sequences. Its figures come
from a closed loop of as many users: the frontier is throughput per GPU against the tokens per second of one user. How
many copies an asked load needs follows from the largest limit, or at a rate from the largest arrival rate, with which
one copy holds the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, product
from pathlib import Path
from statistics import NormalDist
from typing import Any

from costmodel.base.errors import InputError, ProjectError, ShortageError
from costmodel.base.process import usable_cores
from costmodel.base.units import format_quantity, whole_number
from costmodel.gpu.families.rates import dense_peak
from costmodel.machines.cluster import load_cluster, load_gpu
from costmodel.pages.charts import PALETTE, inline_chart, set_logarithmic, set_tip
from costmodel.pages.document import render, write_page
from e2e.capture.models.served_model import LatentAttention, ServedModel
from e2e.serving.engines import engine_named
from e2e.serving.serving_answer import Tables, deployment_of, model_of, serve
from e2e.serving.serving_request import PlanRequest, ServingRequest
from e2e.serving.serving_result import PROBABILITY, ServingResult, serving_result
from e2e.sources.gpu_prices import read_prices
from e2e.sweeps.worker_process import each_in_processes, tie_worker

# Requests of a closed loop, per user and at least; of arrivals at a rate.
_PER_USER, _LEAST, _ARRIVALS = 10, 32, 600
# More users are tried as long as throughput grows by this factor.
_GAIN = 1.03
# At a rate: most copies, as a multiple of those that the throughput asks for.
_MOST_COPIES = 64
_HALF_WIDTH = NormalDist().inv_cdf(0.5 + PROBABILITY / 2)


@dataclass(frozen=True)
class PlanRow:
    """One setting: a copy of the model on ``gpus`` GPUs that serves ``users`` at once, and what it gives them."""

    request: ServingRequest
    served: ServingResult
    gpus: int
    users: int
    # Probability that both targets are held.
    probability: float
    # For the asked load, if the targets are held: copies, and the price of all per hour if it is known.
    copies: int | None = None
    per_hour: float | None = None

    @property
    def total_gpus(self) -> int | None:
        """GPUs of all copies."""
        return None if self.copies is None else self.copies * self.gpus

    @property
    def cost(self) -> float:
        """What is made small: the price per hour, or the number of GPUs; infinite if the targets are not held."""
        found = self.per_hour if self.per_hour is not None else self.total_gpus
        return math.inf if found is None else found

    @property
    def place(self) -> tuple[float, float]:
        """Place on the frontier: tokens per second of one user, and of all per GPU."""
        return self.served.tokens_per_second_per_user, self.served.output_tokens_per_second_per_gpu

    def to_json(self) -> dict[str, Any]:
        """The setting as ``--json`` prints it."""
        asked = ("gpu", "engine", "parallel", "precision", "speculate", "disaggregate", "rate")
        figures = ("output_tokens_per_second_per_gpu", "tokens_per_second_per_user", "requests_per_second")
        own = ("gpus", "users", "probability", "copies", "total_gpus", "per_hour")
        return {
            **{name: getattr(self.request, name) for name in asked},
            **{name: asdict(getattr(self.served, name)) for name in ("ttft_seconds", "tpot_seconds")},
            **{name: getattr(self.served, name) for name in figures},
            **{name: getattr(self, name) for name in own},
        }


@dataclass
class ServingPlan:
    """All settings, the cheapest first; those that no GPU holds are told in ``refused``."""

    request: PlanRequest
    rows: list[PlanRow] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def best(self) -> PlanRow | None:
        """The cheapest setting that holds the targets."""
        return next((each for each in self.rows if each.cost < math.inf), None)

    @property
    def frontier(self) -> list[PlanRow]:
        """Settings, with all users busy, that none surpasses both in throughput per GPU and for one user; the fastest
        for a user first.
        """
        found: list[PlanRow] = []
        for each in sorted((row for row in self.rows if row.request.rate is None), key=lambda row: row.place)[::-1]:
            if not found or each.place[1] > found[-1].place[1]:
                found.append(each)
        return found


# Progress: deployments done, all of them, and the newest.
PlanProgress = Callable[[int, int, str], None]
_Task = tuple[PlanRequest, ServingRequest, "float | None"]


def plan_serving(request: PlanRequest, progress: PlanProgress = lambda done, count, text: None) -> ServingPlan:
    """Price all settings; Ctrl-C keeps those that are done. Raises ``InputError`` for options that cannot be."""
    tasks = dict(enumerate(_tasks(request)))
    workers = request.workers or usable_cores()
    plan, errors = ServingPlan(request), list[ProjectError]()
    found: Iterator[tuple[int, list[PlanRow] | ProjectError]] = ((place, _rows(task)) for place, task in tasks.items())
    if workers > 1 and len(tasks) > 3:
        found = each_in_processes(_rows, tasks, workers, tie_worker)
    try:
        for done, (place, rows) in enumerate(found, 1):
            if isinstance(rows, ProjectError):
                errors.append(rows)
                plan.refused.append(str(rows))
            else:
                plan.rows += rows
            asked = tasks[place][1]
            progress(done, len(tasks), f"{asked.gpus} x {asked.gpu}, {asked.engine}, {asked.parallel}")
    except KeyboardInterrupt:
        plan.stopped = True
    if errors and not plan.rows and not plan.stopped:
        raise next((each for each in errors if isinstance(each, ShortageError)), errors[0])
    plan.rows.sort(key=lambda row: (row.cost, -row.probability, -row.place[1]))
    return plan


def _tasks(request: PlanRequest) -> list[_Task]:
    """All deployments, with the price of a GPU-hour."""
    model = model_of(request)
    for engine in _names(request.engine):
        engine_named(engine)
    prices = None if request.price is None else read_prices(request.price)
    counts = [whole_number(each) or 0 for each in request.gpus.split(",")]
    if not all(counts):
        raise InputError(f"--gpus {request.gpus}: write numbers of GPUs, such as 1,2,4,8")
    found = []
    for gpu, count, engine in product(_names(request.gpus_of), counts, _names(request.engine)):
        price = None if prices is None else prices.of(gpu, load_gpu(gpu).name).per_gpu_hour
        ways, precisions = _ways(model, gpu, count), _precisions(request, model, gpu)
        drafts, splits = {"", request.speculate}, {"", request.disaggregate}
        for each in product(ways, precisions, sorted(drafts), sorted(splits)):
            named = dict(zip(("parallel", "precision", "speculate", "disaggregate"), each, strict=True))
            found.append((request, request.served(gpu=gpu, gpus=count, engine=engine, **named), price))
    return found


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _ways(model: ServedModel, gpu: str, count: int) -> list[str]:
    """Ways to share ``model`` among ``count`` GPUs: tensor parallelism, experts whole or divided, attention divided or
    copied where keys are common to all heads, and stages where GPUs have no fast links.
    """
    found = [f"tp={count}"]
    if count == 1:
        return found
    if model.has_experts:
        found.append(f"tp={count},ep={count}")
        if any(isinstance(layer.mixer, LatentAttention) for layer, _ in model.layers):
            found.append(f"tp={count},ep={count},dp-attention={count}")
    if load_cluster(gpu, count).topology in ("host", "pairs") and count % 2 == 0:
        found.append(f"tp={count // 2},pp=2")
    return found


def _precisions(request: PlanRequest, model: ServedModel, gpu: str) -> list[str]:
    if request.precision:
        return [request.precision]
    eight = dense_peak(load_gpu(gpu), "float8") is not None
    return ["", "weights=fp8,kv=fp8"] if eight and not (model.stored or model.stored_experts) else [""]


def _rows(task: _Task) -> list[PlanRow] | ProjectError:
    """Settings of one deployment, or why it has none."""
    try:
        return _settings(*task)
    except ProjectError as error:
        return error


def _settings(request: PlanRequest, asked: ServingRequest, price: float | None) -> list[PlanRow]:
    tables, deployment = Tables(), deployment_of(asked)
    ranks = deployment.parallel.attention_dp  # each with a limit of sequences of its own

    def row(users: int, copies: int | None = None, **load: Any) -> PlanRow:
        """Setting for at most ``users`` at once under ``load``."""
        one = replace(asked, engine_options=f"sequences={-(-users // ranks)}", **load)
        answer = serve(one, tables)
        served = serving_result(answer, with_table_error=False)
        sure = _probability(request, served, ("ttft", "tpot"))
        per_hour = None if price is None or copies is None else price * copies * answer.gpus
        return PlanRow(one, served, answer.gpus, users, sure, copies, per_hour)

    def with_users(users: int, copies: int | None = None) -> PlanRow:
        return row(users, copies, concurrency=users, requests=max(_PER_USER * users, _LEAST))

    rows: list[PlanRow] = []
    for users in (1 << power for power in range((deployment.engine.sequences * ranks).bit_length())):
        if rows and users * (asked.input_length + asked.output_length) > rows[-1].served.cache["tokens"]:
            break
        rows.append(with_users(users))
        if len(rows) > 1 and rows[-1].served.requests_per_second < _GAIN * rows[-2].served.requests_per_second:
            break
    # Requests that arrive at a rate do not wait for one another as users do who all begin at once.
    targets = ("ttft", "tpot") if request.rate is None else ("tpot",)
    holding = [each for each in rows if _probability(request, each.served, targets) >= request.probability]
    if not holding:
        return rows
    most = holding[-1]
    if request.concurrency is not None:
        copies = -(-request.concurrency // most.users)
        users = -(-request.concurrency // copies)
        return [*(each for each in rows if each.users != users), with_users(users, copies)]
    assert request.rate is not None
    # The copies are at least as many as their throughput asks for; arrivals at random ask for more.
    least = max(math.ceil(request.rate / max(each.served.requests_per_second for each in rows)), 1)
    low, high, best = least, least, None
    while low < high if best else high <= _MOST_COPIES * least:
        copies = (low + high) // 2 if best else high
        found = row(most.users, copies, rate=request.rate / copies, requests=_ARRIVALS)
        if found.probability >= request.probability:
            best, high = found, copies
        else:
            low = copies + 1
            high = high if best else max(low, math.ceil(1.3 * copies))
    return [*rows, best] if best else rows


def _probability(request: PlanRequest, served: ServingResult, targets: Sequence[str]) -> float:
    """Probability that the ``targets`` are held: errors are log-normal, and relatively those of the mean."""
    found = [1.0]
    for name in targets:
        target, spread = getattr(request, name), getattr(served, f"{name}_seconds")
        if target is not None and spread.mean:
            width = math.log(getattr(served, f"{name}_interval_seconds")[1] / spread.mean)
            found.append(NormalDist().cdf(_HALF_WIDTH * math.log(target / spread[request.percentile]) / width))
    return min(found)


# --- reports ------------------------------------------------------------------------------------


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
    best, lines, asked = plan.best, [], plan.request
    if best is None:
        lines.append(f"{_targets(plan)}: no setting holds this with probability {plan.request.probability:g}")
    else:
        lines += [f"cheapest for {_targets(plan)}:", *_table(plan, [best])]
        own = "" if "/" in str(asked.model or asked.model_config) else f" ({asked.model}: your weights' name or folder)"
        lines.append(f"start each copy with{own}: {start_command(best)}")
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


def _cells(plan: ServingPlan, row: PlanRow) -> dict[str, str]:
    asked, served, held = row.request, row.served, plan.request.percentile
    name = "" if held == "mean" else f" {held}"
    found = "" if row.total_gpus is None else f"{row.copies} x {row.gpus} = {row.total_gpus}"
    return {
        "GPUs": f"{row.gpus} x {asked.gpu}",
        "engine": asked.engine,
        "parallel": ", ".join(filter(None, (asked.parallel, asked.disaggregate, asked.speculate))),
        "precision": asked.precision or "as stored",
        "users": f"{row.users:,}",
        f"TTFT{name}": format_quantity(served.ttft_seconds[held], "s", 3),
        f"TPOT{name}": format_quantity(served.tpot_seconds[held], "s", 3),
        "tokens/s/user": f"{served.tokens_per_second_per_user:.1f}",
        "tokens/s/GPU": f"{served.output_tokens_per_second_per_gpu:,.0f}",
        "sure": f"{row.probability:.0%}",
        "in all": found if row.per_hour is None else f"{found}, {row.per_hour:.2f}/h",
    }


def _table(plan: ServingPlan, rows: Sequence[PlanRow]) -> list[str]:
    cells = [_cells(plan, row) for row in rows]
    listed = [list(cells[0]), *(list(each.values()) for each in cells)] if cells else []
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]


def _sentence(plan: ServingPlan, row: PlanRow) -> str:
    """The cells of a table's row by their names, but for those that say themselves what they are."""
    plain = ("GPUs", "engine", "parallel", "precision")
    cells = _cells(plan, row).items()
    return ", ".join(text if name in plain else f"{name} {text}" for name, text in cells if text)


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
    best, cells = plan.best, [_cells(plan, row) for row in plan.rows]
    page = render(
        "e2e.serving/plan.html",
        title=f"Serving {plan.request.model or plan.request.model_config}",
        answer="No setting holds the targets." if best is None else _sentence(plan, best),
        command="" if best is None else start_command(best),
        question=_targets(plan),
        frontier=inline_chart("Throughput per GPU against the speed of one user", lambda axes: _draw(axes, plan), 5.0),
        columns=list(cells[0]) if cells else [],
        surpassing=[list(_cells(plan, row).values()) for row in plan.frontier],
        settings=[list(each.values()) for each in cells],
        refused=[(each,) for each in plan.refused],
    )
    write_page(path, page)


def _draw(axes: Any, plan: ServingPlan) -> None:
    gpus = dict.fromkeys(row.request.gpu for row in plan.rows)
    for gpu, colour in zip(gpus, cycle(PALETTE), strict=False):
        rows = [row for row in plan.rows if row.request.gpu == gpu]
        for row in rows:
            (dot,) = axes.plot(*row.place, ".", color=colour, alpha=0.5)
            set_tip(dot, _sentence(plan, row))
        best = ServingPlan(plan.request, rows).frontier
        axes.plot(*zip(*(row.place for row in best), strict=True), color=colour, label=gpu)
    if plan.best:
        axes.plot(*plan.best.place, "D", color="none", markeredgecolor="#777777", markersize=12, label="the cheapest")
    set_logarithmic(axes, "xy")
    axes.set(xlabel="tokens/s of one user", ylabel="output tokens/s per GPU")
    axes.legend()
