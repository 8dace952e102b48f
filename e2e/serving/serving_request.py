"""What a user asks of ``e2e serve``, and the road from it to an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.input_files import read_text
from costmodel.machines.cluster import load_cluster
from costmodel.operators.experts import ExpertRouting
from e2e.serving.cache_room import CacheRoom, cache_room
from e2e.serving.deployment import Deployment, read_parallel, read_precision
from e2e.serving.engines import engine_named
from e2e.serving.replicas import serve_workload
from e2e.serving.schedule import Scheduler, ServedRun
from e2e.serving.served_model import ServedModel, served_model
from e2e.serving.step_price import StepPrice
from e2e.serving.workload import Workload, closed_loop, open_loop


@dataclass(frozen=True)
class ServingRequest:
    """Options of ``python -m e2e serve``, by their names."""

    gpu: str
    model: str | None = None
    model_config: Path | None = None
    gpus: int = 1
    parallel: str = ""
    engine: str = "vllm"
    precision: str = ""
    input_length: int = 1024
    output_length: int = 256
    # Lengths are drawn evenly between this share and 1 of the two above.
    shortest_length: float = 1.0
    concurrency: int | None = None
    rate: float | None = None
    requests: int | None = None


@dataclass(frozen=True)
class ServingAnswer:
    """One deployment under one load."""

    request: ServingRequest
    deployment: Deployment
    workload: Workload
    price: StepPrice
    room: CacheRoom
    run: ServedRun

    @property
    def ttft_seconds(self) -> np.ndarray:
        """Seconds to the first token of every request."""
        return self.run.first - self.run.sent + self.deployment.engine.server

    @property
    def tpot_seconds(self) -> np.ndarray:
        """Mean seconds of every further token of each request."""
        return (self.run.last - self.run.first) / np.maximum(self.workload.outputs - 1, 1)


def serve(request: ServingRequest) -> ServingAnswer:
    """Answer ``request``; ``InputError`` or ``MachineError`` for what cannot be served, before long work."""
    deployment = deployment_of(request)
    room = cache_room(deployment)
    workload = workload_of(request)
    longest = int((workload.inputs + workload.outputs).max())
    if room.tokens < longest:
        raise InputError(room.shortage(deployment, longest))
    price = StepPrice(deployment)
    run = ServedRun.of(workload.count)
    serve_workload(workload, [Scheduler(price, room.tokens, run)])
    return ServingAnswer(request, deployment, workload, price, room, run)


def deployment_of(request: ServingRequest) -> Deployment:
    """The deployment that ``request`` describes."""
    model = model_of(request)
    parallel = read_parallel(request.parallel, request.gpus)
    deployment = Deployment(
        model,
        load_cluster(request.gpu, parallel.gpus),
        engine_named(request.engine),
        parallel,
        read_precision(request.precision, model),
        None,
    )
    deployment.check()
    return deployment


def model_of(request: ServingRequest) -> ServedModel:
    """The model of ``--model`` or ``--model-config``."""
    if (request.model is None) == (request.model_config is None):
        raise InputError("give --model NAME or --model-config FILE, one of them")
    if request.model_config is not None:
        return served_model(_read(request.model_config), str(request.model_config))
    raise InputError(f"--model {request.model}: not yet")


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(read_text(path, "configuration"))  # type: ignore[no-any-return]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); save the configuration again") from None


def workload_of(request: ServingRequest) -> Workload:
    """The requests that clients send."""
    lengths = (request.input_length, request.output_length)
    if request.rate is not None:
        return open_loop(*lengths, request.rate, request.requests or 1000, request.shortest_length)
    concurrency = request.concurrency or 1
    return closed_loop(*lengths, concurrency, request.requests or 10 * concurrency, request.shortest_length)


Routing = ExpertRouting | None
