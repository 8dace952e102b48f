"""Latency and throughput of a tuned network alone: ``python -m fusion benchmark``.

Each stream is a process with a copy of the network that answers one request after the other, like a server. All streams
run concurrently; TVM's thread pinning is off, or all streams would use the same cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.cores import threads_to_use, usable_cores
from costmodel.base.errors import InputError
from costmodel.base.say import Say
from fusion.artifact.build_folder import Artifact, check_runnable, read_artifact
from fusion.comparing.engines.base import EngineWorkload, Unavailable
from fusion.comparing.engines.engine_table import ENGINES, TUNED
from fusion.comparing.engines.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.model.named_arrays import random_arrays

WARMUP_CALLS, LEAST_CALLS = 10, 20
LONGEST_SECONDS = 60.0  # must be below the time limit of a worker's call


@dataclass(frozen=True)
class BuildTimes:
    """Measured latencies in seconds over the calls of all streams, and throughput.

    ``samples_per_second``: images answered, ``batch`` per call.
    """

    build: str
    streams: int
    threads: int
    batch: int
    calls: int
    minimum: float
    mean: float
    median: float
    percentile_90: float
    percentile_99: float
    maximum: float
    samples_per_second: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary, as documented for ``--json``."""
        return asdict(self)


def benchmark_build(
    folder: Path, streams: int = 1, threads: int | None = None, seconds: float = 5.0, say: Say = lambda _: None
) -> BuildTimes:
    """Run the network in ``folder`` on random inputs for ``seconds``, in ``streams`` processes of ``threads`` threads.

    ``threads`` defaults to an equal share of the cores, at most the number of the build. Raises ``InputError`` for an
    incomplete build, more threads than cores, or an engine that fails.
    """
    if not 0 < seconds <= LONGEST_SECONDS:
        raise InputError(f"--seconds {seconds:g}: must be more than 0, and {LONGEST_SECONDS:g} at most")
    if not 1 <= streams <= usable_cores():
        raise InputError(f"--streams {streams}: this process may use 1 to {usable_cores()} cores")
    artifact = read_artifact(folder)
    check_runnable(artifact)
    share = max(1, min(usable_cores() // streams, artifact.manifest.threads))
    each = threads_to_use(threads, share)
    if each * streams > usable_cores():
        raise InputError(f"{streams} streams of {each} threads: there are {usable_cores()} cores")
    durations = _run(artifact, streams, each, seconds, say)
    return summarize_calls(str(folder), each, _batch(artifact), durations)


def summarize_calls(build: str, threads: int, batch: int, durations: Sequence[np.ndarray]) -> BuildTimes:
    """Statistics of call durations in seconds; ``durations`` has one array per stream."""
    calls = np.concatenate(durations)
    return BuildTimes(
        build=build,
        streams=len(durations),
        threads=threads,
        batch=batch,
        calls=len(calls),
        minimum=float(calls.min()),
        mean=float(calls.mean()),
        median=float(np.median(calls)),
        percentile_90=float(np.quantile(calls, 0.9)),
        percentile_99=float(np.quantile(calls, 0.99)),
        maximum=float(calls.max()),
        samples_per_second=float(batch * sum(len(own) / own.sum() for own in durations)),
    )


def _run(artifact: Artifact, streams: int, threads: int, seconds: float, say: Say) -> list[np.ndarray]:
    inputs = random_arrays(artifact.manifest.inputs)
    with ExitStack() as stack:
        say(f"loading {streams} x {threads} threads")
        unpinned = {"TVM_BIND_THREADS": "0"} if streams > 1 else {}
        workers = [stack.enter_context(Worker(ENGINES[TUNED], threads, unpinned)) for _ in range(streams)]
        try:
            for worker in workers:
                worker.prepare(build_workload(artifact, threads), PREPARE_TIMEOUT_SECONDS)
                worker.bind(inputs)
            say(f"running for {seconds:g} s")
            with ThreadPoolExecutor(streams) as pool:
                return list(pool.map(lambda worker: worker.block(WARMUP_CALLS, LEAST_CALLS, seconds), workers))
        except (EngineFailed, Unavailable) as error:
            raise InputError(
                f"{artifact.directory}: the network cannot be run: {error}; tune the model again on this machine"
            ) from error


def build_workload(artifact: Artifact, threads: int) -> EngineWorkload:
    """Engine workload of a build with ``threads`` threads."""
    manifest = artifact.manifest
    return EngineWorkload(
        model=Path(manifest.model_path),
        model_sha256=manifest.model_sha256,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        threads=threads,
        build=artifact.directory,
        cache=artifact.cache,
    )


def _batch(artifact: Artifact) -> int:
    """Leading dimension of the first input with dimensions, default 1."""
    return next((info.shape[0] for info in artifact.manifest.inputs if info.shape), 1)


def render_times(times: BuildTimes) -> str:
    """Format the times as a few lines of text."""
    latencies = (
        ("minimum", times.minimum), ("median", times.median), ("mean", times.mean), ("90 %", times.percentile_90),
        ("99 %", times.percentile_99), ("maximum", times.maximum),
    )  # fmt: skip
    listed = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in latencies)
    streams = f"{times.streams} stream{'s' if times.streams > 1 else ''} of {times.threads} threads"
    return (
        f"{times.build}: {times.calls} calls of batch {times.batch}, {streams}\n"
        f"latency in ms: {listed}\nthroughput: {times.samples_per_second:.1f} samples/s"
    )
