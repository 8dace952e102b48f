"""The cheapest way to serve a model within latency targets: GPUs, their number, parallelism, engine, precision, batch.

Every setting is a deployment (GPU, number, engine, parallelism, precision) with a limit of sequences. Its figures come
from a closed loop of as many users: the frontier is throughput per GPU against the tokens per second of one user. How
many copies an asked load needs follows from the largest limit, or at a rate from the largest arrival rate, with which
one copy holds the targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import NormalDist

from costmodel.base.errors import InputError, ProjectError, ShortageError
from costmodel.base.process import usable_cores
from costmodel.base.units import whole_number
from costmodel.gpu.families.rates import dense_peak
from costmodel.machines.cluster import load_cluster, load_gpu
from e2e.serving.cache_room import CacheRoom, cache_room
from e2e.serving.deployment import Deployment
from e2e.serving.replicas import serve_workload
from e2e.serving.schedule import Scheduler, ServedRun
from e2e.serving.served_model import Experts, LatentAttention, ServedModel
from e2e.serving.serving_answer import ServingAnswer, deployment_of, longest_request, model_of, workload_of
from e2e.serving.serving_request import PlanRequest, ServingRequest
from e2e.serving.serving_result import PROBABILITY, latency_intervals
from e2e.serving.step_price import StepPrice
from e2e.sources.gpu_prices import GpuPrices, read_prices
from e2e.sweeps.worker_process import each_in_processes, tie_worker

# Requests of a closed loop, per user and at least; of arrivals at a rate.
_PER_USER, _LEAST, _ARRIVALS = 10, 32, 600
# A larger limit of sequences is tried as long as throughput grows by this factor.
_GAIN = 1.03
_HALF_WIDTH = NormalDist().inv_cdf(0.5 + PROBABILITY / 2)


@dataclass(frozen=True)
class PlanRow:
    """One setting: a copy of the model, and what it gives ``concurrency`` users; seconds."""

    gpu: str
    gpus: int
    engine: str
    parallel: str
    precision: str
    # Limit of sequences of a copy.
    concurrency: int
    ttft_seconds: float
    tpot_seconds: float
    # Probability that both targets are held.
    probability: float
    output_tokens_per_second_per_gpu: float
    tokens_per_second_per_user: float
    requests_per_second: float
    # Requests that arrive at a copy per second; None: all users wait for answers.
    rate: float | None = None
    # For the asked load, if the targets are held: copies, GPUs of all, and their price per hour if it is known.
    copies: int | None = None
    total_gpus: int | None = None
    per_hour: float | None = None

    @property
    def cost(self) -> float:
        """What is made small: the price per hour, or the number of GPUs; infinite if the targets are not held."""
        found = self.per_hour if self.per_hour is not None else self.total_gpus
        return math.inf if found is None else found


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
        for each in sorted(
            (each for each in self.rows if each.rate is None),
            key=lambda row: (-row.tokens_per_second_per_user, -_throughput(row)),
        ):
            if not found or _throughput(each) > _throughput(found[-1]):
                found.append(each)
        return found


def _throughput(row: PlanRow) -> float:
    return row.output_tokens_per_second_per_gpu


# Progress: deployments done, all of them, and the newest.
PlanProgress = Callable[[int, int, str], None]
_Task = tuple[PlanRequest, ServingRequest, "float | None"]


def plan_serving(request: PlanRequest, progress: PlanProgress = lambda done, count, text: None) -> ServingPlan:
    """Price all settings; Ctrl-C keeps those that are done. Raises ``InputError`` for options that cannot be."""
    prices = None if request.price is None else read_prices(request.price)
    tasks = dict(enumerate(_tasks(request, prices)))
    workers = request.workers or usable_cores()
    plan, errors = ServingPlan(request), list[ProjectError]()
    if workers == 1 or len(tasks) < 4:
        found: Iterator[tuple[int, list[PlanRow] | ProjectError]] = (
            (place, _rows(task)) for place, task in tasks.items()
        )
    else:
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
    plan.rows.sort(key=lambda row: (row.cost, -row.probability, -_throughput(row)))
    return plan


def _tasks(request: PlanRequest, prices: GpuPrices | None) -> list[_Task]:
    """All deployments, with the price of a GPU-hour."""
    model = model_of(request.served(gpu="h100-sxm"))
    counts = [whole_number(each) or 0 for each in request.gpus.split(",")]
    if not all(counts):
        raise InputError(f"--gpus {request.gpus}: write numbers of GPUs, such as 1,2,4,8")
    found = []
    for gpu, count, engine in product(_names(request.gpus_of), counts, _names(request.engine)):
        price = None if prices is None else prices.of(gpu, load_gpu(gpu).name).per_gpu_hour
        for parallel, precision in product(_ways(model, gpu, count), _precisions(request, model, gpu)):
            asked = request.served(gpu=gpu, gpus=count, engine=engine, parallel=parallel, precision=precision)
            found.append((request, asked, price))
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
    if any(isinstance(layer.block, Experts) for layer, _ in model.layers):
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
    deployment = deployment_of(asked)
    room = cache_room(deployment)
    longest = longest_request(deployment.model, workload_of(replace(asked, requests=_LEAST)), asked)
    if room.tokens < longest:
        raise ShortageError(room.shortage(deployment, longest))
    copy = _Copy(request, asked, deployment, StepPrice(deployment), room)
    rows: list[PlanRow] = []
    for users in (1 << place for place in range(14)):
        if rows and (users > deployment.engine.sequences or users * longest > room.tokens):
            break
        rows.append(copy.closed(users))
        if len(rows) > 1 and rows[-1].requests_per_second < _GAIN * rows[-2].requests_per_second:
            break
    return [_priced(each, price) for each in copy.with_copies(rows)]


@dataclass(frozen=True)
class _Copy:
    """One copy of the model, under different loads."""

    request: PlanRequest
    asked: ServingRequest
    deployment: Deployment
    price: StepPrice
    room: CacheRoom

    def closed(self, users: int) -> PlanRow:
        """What ``users`` get."""
        return self._row(replace(self.asked, concurrency=users, requests=max(_PER_USER * users, _LEAST)), users)

    def at_rate(self, rate: float, users: int) -> PlanRow:
        """What those get who send ``rate`` requests per second."""
        return self._row(replace(self.asked, rate=rate, requests=_ARRIVALS), users)

    def _row(self, asked: ServingRequest, users: int) -> PlanRow:
        load, run = workload_of(asked), ServedRun.of(int(asked.requests or 0))  # type: ignore[arg-type]
        price = self.price.with_engine(replace(self.price.engine, sequences=users))
        serve_workload(load, [Scheduler(price, self.room.tokens, run)])
        answer = ServingAnswer(asked, self.deployment, load, price, self.room, run)
        ttft, tpot = float(answer.ttft_seconds.mean()), float(answer.tpot_seconds.mean())
        highest = [high for _, high in latency_intervals(answer)]
        seconds = float(run.last.max())
        return PlanRow(
            str(asked.gpu), asked.gpus, asked.engine, asked.parallel, asked.precision, users, ttft, tpot,
            min(_held(ttft, highest[0], self.request.ttft), _held(tpot, highest[1], self.request.tpot)),
            float(load.outputs.sum()) / seconds / asked.gpus, 1 / tpot if tpot else 0.0, load.count / seconds,
            asked.rate,
        )  # fmt: skip

    def with_copies(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        """``rows``, and with how many copies they hold the asked load."""
        holds = [each for each in rows if each.probability >= self.request.probability]
        if not holds:
            return list(rows)
        most = holds[-1]
        rest = [each for each in rows if each is not most]
        if self.request.concurrency is not None:
            copies = -(-self.request.concurrency // most.concurrency)
            users = -(-self.request.concurrency // copies)
            return [*rest, replace(self.closed(users) if users != most.concurrency else most, copies=copies)]
        assert self.request.rate is not None
        # The copies are at least as many as their throughput asks for; arrivals at random ask for more.
        few = max(math.ceil(self.request.rate / max(each.requests_per_second for each in rows)), 1)
        many, best = few, None
        while best is None and many <= 64 * few:
            found = self.at_rate(self.request.rate / many, most.concurrency)
            if found.probability >= self.request.probability:
                best = replace(found, copies=many)
            else:
                few, many = many + 1, max(many + 1, math.ceil(many * 1.3))
        while best is not None and few < many:
            middle = (few + many) // 2
            found = self.at_rate(self.request.rate / middle, most.concurrency)
            if found.probability >= self.request.probability:
                best, many = replace(found, copies=middle), middle
            else:
                few = middle + 1
        return list(rows) if best is None else [*rows, best]


def _held(mean: float, high: float, target: float | None) -> float:
    """Probability that ``target`` is held: errors are log-normal, and ``high`` is the upper end of the interval."""
    if target is None:
        return 1.0
    return NormalDist().cdf(_HALF_WIDTH * math.log(target / mean) / max(math.log(high / mean), 1e-9))


def _priced(row: PlanRow, price: float | None) -> PlanRow:
    if row.copies is None:
        return row
    gpus = row.copies * row.gpus
    return replace(row, total_gpus=gpus, per_hour=None if price is None else gpus * price)
