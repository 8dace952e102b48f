"""The road of ``e2e serve``: from a request to what every client saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, ShortageError
from costmodel.base.input_files import decoded, read_text
from costmodel.collectives import collective_cost_model
from costmodel.machines.cluster import load_cluster
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.capture.models.configurations import served, with_defaults
from e2e.serving.cache_room import CacheRoom, cache_room
from e2e.serving.deployment import Deployment, Disaggregation, read_disaggregation, read_parallel, read_precision
from e2e.serving.engines import as_started, engine_named, with_engine_options
from e2e.serving.prefix_cache import PrefixCache
from e2e.serving.replicas import Decoders, serve_workload
from e2e.serving.request_trace import read_trace
from e2e.serving.schedule import Scheduler, ServedRun
from e2e.serving.served_model import ServedModel, served_model
from e2e.serving.serving_request import MOST_REQUESTS, ServingRequest
from e2e.serving.speculation import read_speculation
from e2e.serving.step_price import StepPrice, TableError, table_error
from e2e.serving.workload import Workload, closed_loop, open_loop, with_prefixes
from e2e.step.options import parse_routing

_BEFORE_AMPERE = ("pascal", "volta", "turing")


@dataclass(frozen=True)
class ServingAnswer:
    """One deployment under one load; arrays over the requests."""

    request: ServingRequest
    deployment: Deployment
    workload: Workload
    price: StepPrice
    room: CacheRoom
    run: ServedRun

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        return self.split.gpus if self.request.disaggregate else self.request.gpus * self.request.replicas

    @property
    def split(self) -> Disaggregation:
        """Copies for prompts and for decoding."""
        return read_disaggregation(self.request.disaggregate, read_parallel(self.request.parallel, self.request.gpus))

    def table_error(self) -> TableError:
        """Error of tabulated steps, over steps like those of this run."""
        load, steps = self.workload, max(self.run.steps, 1)
        sequences = max(round(min(float(load.outputs.sum()) / steps, self.deployment.engine.sequences)), 1)
        contexts = int(load.inputs.min()), int((load.inputs + load.outputs).max())
        return table_error(self.price, sequences, contexts, int(load.inputs.max()))

    @property
    def ttft_seconds(self) -> np.ndarray:
        """Seconds to the first token of every request."""
        return self.run.first - self.run.sent

    @property
    def tpot_seconds(self) -> np.ndarray:
        """Mean seconds of every further token of each request."""
        return (self.run.last - self.run.first) / np.maximum(self.workload.outputs - 1, 1)


def serve(request: ServingRequest, tables: StepPrice | None = None) -> ServingAnswer:
    """Answer ``request``; ``InputError`` or ``MachineError`` for what cannot be served, before long work,
    ``ShortageError`` for a model that does not fit. ``tables``: prices of an answer with the same kernels.
    """
    deployment = deployment_of(request)
    room = cache_room(deployment)
    workload = workload_of(request)
    longest = workload.longest
    if room.tokens < longest:
        shortage = room.shortage(deployment, longest)
        raise ShortageError(shortage, {"fits": False, "memory_shortage": shortage, "memory": room.memory()})
    price = StepPrice(deployment) if tables is None else tables.with_engine(deployment.engine)
    run = ServedRun.of(workload.count)

    def copies(count: int, price: StepPrice, room: CacheRoom) -> list[Scheduler]:
        blocks = workload.prefix_block
        return [Scheduler(price, room.tokens, run, PrefixCache(blocks) if blocks else None) for _ in range(count)]

    if request.disaggregate:
        split = read_disaggregation(request.disaggregate, read_parallel(request.parallel, request.gpus))
        prompts = replace(
            deployment, parallel=split.prefill_parallel, speculation=None,
            cluster=load_cluster(str(request.gpu), split.prefill_parallel.gpus),
        )  # fmt: skip
        prompts.check()
        prompt_room = cache_room(prompts)
        if prompt_room.tokens < longest:
            raise ShortageError(prompt_room.shortage(prompts, longest))
        transfer = cache_transfer(prompts, deployment, str(request.gpu), split.gpus)
        decoders = Decoders(copies(split.decode, price, room), transfer)
        serve_workload(workload, copies(split.prefill, StepPrice(prompts), prompt_room), decoders=decoders)
    else:
        count = request.replicas * (request.gpus // deployment.parallel.gpus)
        serve_workload(workload, copies(count, price, room), request.router)
    return ServingAnswer(request, deployment, workload, price, room, run)


def cache_transfer(sender: Deployment, receiver: Deployment, gpu: str, gpus: int) -> Callable[[int], float]:
    """Seconds to send the cache of so many tokens between two of ``gpus`` GPUs: within a node if that holds them all,
    else over the network. Ranks send at once, each what it holds or what its peer takes.
    """
    cluster = load_cluster(gpu, 1)
    near = gpus <= cluster.node_gpus
    cluster = load_cluster(gpu, 2 if near else 2 * cluster.node_gpus)
    size = max(sender.cache_bytes(), receiver.cache_bytes())
    asked = [CollectiveTransfer("send_recv", size * tokens, 2, 1 if near else 2) for tokens in (1, 4096)]
    first, last = (each.seconds for each in collective_cost_model(cluster).estimate(asked))
    return lambda tokens: first + (last - first) / 4095 * (tokens - 1)


def deployment_of(request: ServingRequest) -> Deployment:
    """The deployment that ``request`` describes."""
    model = model_of(request)
    parallel = read_parallel(request.parallel, request.gpus)
    if request.disaggregate:
        parallel = read_disaggregation(request.disaggregate, parallel).decode_parallel
    cluster = load_cluster(request.gpu, parallel.gpus)
    if cluster.machine.chip().architecture in _BEFORE_AMPERE:
        raise InputError(f"--gpu {request.gpu}: engines' kernels are known for Ampere and later GPUs")
    engine = as_started(engine_named(request.engine), request.input_length, request.concurrency or 0)
    deployment = Deployment(
        model,
        cluster,
        with_engine_options(engine, request.engine_options),
        parallel,
        read_precision(request.precision, model, cluster.machine),
        None if request.routing == "drawn" else parse_routing(request.routing),
        read_speculation(request.speculate, model, named_model),
    )
    deployment.check()
    return deployment


def model_of(request: ServingRequest) -> ServedModel:
    """The model of ``--model`` or ``--model-config``."""
    if request.model_config is None:
        assert request.model is not None
        return served_model(served(request.model), request.model)
    return configured_model(request.model_config)


def named_model(name: str) -> ServedModel:
    """The model of a name, or of a configuration file."""
    return configured_model(Path(name)) if name.endswith(".json") else served_model(served(name), name)


def configured_model(path: Path) -> ServedModel:
    """The model of a Hugging Face configuration file."""
    try:
        config = decoded(read_text(path, "configuration"), once=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); save the configuration again") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: not a Hugging Face model configuration; it must have a model_type")
    return served_model(with_defaults(config), str(path))


def workload_of(request: ServingRequest) -> Workload:
    """The requests that clients send."""
    load = _plain_workload(request)
    if not request.prefix_length:
        return load
    return with_prefixes(load, request.prefix_length, request.prefix_share, request.prefix_groups)


def _plain_workload(request: ServingRequest) -> Workload:
    if request.trace is not None:
        return read_trace(request.trace, request.concurrency, request.duration)
    lengths = (request.input_length, request.output_length)
    count = None if request.requests is None else int(request.requests)  # type: ignore[arg-type]
    if request.rate is not None:
        if request.duration is not None:
            count = max(round(request.rate * request.duration), 1)
            if count > MOST_REQUESTS:
                raise InputError(f"--duration: {count:,} requests arrive; at most {MOST_REQUESTS:,} are taken")
        return open_loop(*lengths, request.rate, count or 1000, request.shortest_length)
    concurrency = request.concurrency or 1
    if request.duration is not None:
        raise InputError("--duration: is for --rate and traces; with --concurrency give the number of --requests")
    return closed_loop(*lengths, concurrency, count or min(10 * concurrency, MOST_REQUESTS), request.shortest_length)
