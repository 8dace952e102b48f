"""The road of ``e2e serve``: from a request to what every client saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, ShortageError
from costmodel.collectives import collective_cost_model
from costmodel.machines.cluster import load_cluster
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.capture.models.served_model import ServedModel, named_model
from e2e.serving.cache_room import CacheRoom, cache_room
from e2e.serving.deployment import (
    Deployment,
    Disaggregation,
    ServingParallel,
    Speculation,
    read_disaggregation,
    read_parallel,
    read_precision,
    read_speculation,
)
from e2e.serving.engines import engine_named
from e2e.serving.prefix_cache import PrefixCache
from e2e.serving.replicas import Decoders, serve_workload
from e2e.serving.schedule import Scheduler, ServedRun
from e2e.serving.serving_request import ServedLoad, ServingRequest
from e2e.serving.step_price import StepPrice
from e2e.serving.workload import Workload, workload_of
from e2e.step.options import parse_routing

_BEFORE_AMPERE = ("pascal", "volta", "turing")


# Prices of steps that several answers share: by parallelism and draft, of deployments that differ in nothing else.
Tables = dict[tuple[ServingParallel, Speculation | None], StepPrice]


@dataclass(frozen=True)
class ServingAnswer:
    """One deployment under one load; arrays over the requests."""

    request: ServingRequest
    deployment: Deployment
    workload: Workload
    tables: Tables
    run: ServedRun

    @property
    def price(self) -> StepPrice:
        """Prices of the steps in which sequences decode."""
        found = self.tables[self.deployment.parallel, self.deployment.speculation]
        return found.with_engine(self.deployment.engine)

    @property
    def room(self) -> CacheRoom:
        """The cache of a copy in which sequences decode."""
        return cache_room(self.deployment)

    @property
    def most_sequences(self) -> int:
        """Most sequences of a copy at once: each copy of the attention has its own."""
        return self.deployment.engine.sequences * self.deployment.parallel.attention_dp

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        split = split_of(self.request)
        return split.gpus if split else self.request.gpus * self.request.replicas

    @property
    def ttft_seconds(self) -> np.ndarray:
        """Seconds to the first token of every request."""
        return self.run.first - self.run.sent

    @property
    def tpot_seconds(self) -> np.ndarray:
        """Mean seconds of every further token of each request."""
        return (self.run.last - self.run.first) / np.maximum(self.workload.outputs - 1, 1)


def serve(request: ServingRequest, tables: Tables | None = None) -> ServingAnswer:
    """Answer ``request``; ``InputError`` or ``MachineError`` for what cannot be served, before long work,
    ``ShortageError`` for a model that does not fit. ``tables``: of answers with the same kernels, to which this adds.
    """
    deployment, workload = deployment_of(request), workload_of(request)
    run, known = ServedRun.of(workload.count), Tables() if tables is None else tables

    def copies(deployment: Deployment, count: int) -> list[Scheduler]:
        room, blocks = cache_room(deployment), workload.prefix_block
        if room.tokens < workload.longest:
            shortage = room.shortage(deployment, workload.longest)
            raise ShortageError(shortage, {"fits": False, "memory_shortage": shortage, "memory": room.memory()})
        kind = deployment.parallel, deployment.speculation
        if kind not in known:
            known[kind] = StepPrice(deployment)
        price = known[kind].with_engine(deployment.engine)
        return [Scheduler(price, room.tokens, run, PrefixCache(blocks) if blocks else None) for _ in range(count)]

    split = split_of(request)
    if split:
        cluster = load_cluster(request.gpu, split.prefill_parallel.gpus)
        prompts = replace(deployment, parallel=split.prefill_parallel, speculation=None, cluster=cluster)
        prompts.check()
        decoding = copies(deployment, split.decode)
        decoders = Decoders(decoding, cache_transfer(prompts, deployment, request.gpu, split.gpus))
        serve_workload(workload, copies(prompts, split.prefill), decoders=decoders)
    else:
        count = request.replicas * (request.gpus // deployment.parallel.gpus)
        if count == 1 and request.router != "round-robin":
            raise InputError(f"--router {request.router}: one copy serves all; give --replicas, or leave it out")
        serve_workload(workload, copies(deployment, count), request.router)
    held = np.minimum(deployment.engine.stream, workload.outputs) - 1  # tokens that the first message waits for
    run.first += (run.last - run.first) * held / np.maximum(workload.outputs - 1, 1)
    return ServingAnswer(request, deployment, workload, known, run)


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
    model, split = model_of(request), split_of(request)
    parallel = split.decode_parallel if split else read_parallel(request.parallel, request.gpus)
    cluster = load_cluster(request.gpu, parallel.gpus)
    if cluster.machine.chip().architecture in _BEFORE_AMPERE:
        raise InputError(f"--gpu {request.gpu}: engines' kernels are known for Ampere and later GPUs")
    load = request.input_length, request.concurrency or 0
    deployment = Deployment(
        model,
        cluster,
        engine_named(request.engine, request.engine_options, *load, cluster.machine, parallel.tp),
        parallel,
        read_precision(request.precision, model, cluster.machine),
        parse_routing(request.routing),
        read_speculation(request.speculate, model),
    )
    deployment.check()
    return deployment


def split_of(request: ServingRequest) -> Disaggregation | None:
    """Copies for prompts and for decoding, if they are apart."""
    parallel = read_parallel(request.parallel, request.gpus)
    return read_disaggregation(request.disaggregate, parallel) if request.disaggregate else None


def model_of(request: ServedLoad) -> ServedModel:
    """The model of ``--model`` or ``--model-config``."""
    return named_model(request.model or Path(str(request.model_config)))
