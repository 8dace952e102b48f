"""Several builds of one model beside each other, by the protocol of ``compare``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from costmodel.base.cores import threads_to_use
from costmodel.base.errors import InputError
from costmodel.base.say import Say
from fusion.artifact.build_folder import Artifact, check_runnable, read_artifact
from fusion.comparing.benchmark_build import build_workload
from fusion.comparing.engines.base import Unavailable
from fusion.comparing.engines.engine_table import ENGINES, TUNED
from fusion.comparing.engines.engine_worker import PREPARE_TIMEOUT_SECONDS, EngineFailed, Worker
from fusion.comparing.rounds import EngineTiming, Sampling, measure
from fusion.model.named_arrays import random_arrays


def compare_builds(
    folders: Mapping[str, Path],
    threads: int | None = None,
    sampling: Sampling | None = None,
    say: Say = lambda _: None,
) -> dict[str, EngineTiming]:
    """Times the builds in ``folders`` in turns, each in its own process; the ratios are to the first of them.

    ``threads`` defaults to those that the first was tuned for. ``InputError`` for a folder that is no whole build,
    builds of different models, and one that fails.
    """
    artifacts = {name: read_artifact(folder) for name, folder in folders.items()}
    baseline, first = next(iter(artifacts.items()))
    used = threads_to_use(threads, first.manifest.threads)
    inputs = random_arrays(first.manifest.inputs)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, artifact in artifacts.items():
            check_runnable(artifact)
            _require_same_model(artifact, first)
            say(f"loading {artifact.directory}")
            worker = stack.enter_context(Worker(ENGINES[TUNED], used))
            try:
                worker.prepare(build_workload(artifact, used), PREPARE_TIMEOUT_SECONDS)
                worker.bind(inputs)
            except (EngineFailed, Unavailable) as error:
                raise InputError(
                    f"{artifact.directory}: the network cannot be run: {error}; tune the model again on this machine"
                ) from error
            workers[name] = worker
        try:
            measured = measure(workers, baseline, sampling or Sampling(), say)
        except EngineFailed as error:
            raise InputError(
                f"{first.directory}: the network failed while it was timed: {error}; "
                "tune the model again on this machine"
            ) from error
    for name, reason in measured.failures.items():
        raise InputError(
            f"{artifacts[name].directory}: the network failed while it was timed: {reason}; "
            "tune the model again on this machine"
        )
    return dict(measured.timings)


def _require_same_model(artifact: Artifact, first: Artifact) -> None:
    own, other = artifact.manifest, first.manifest
    if (own.model_sha256, own.inputs) != (other.model_sha256, other.inputs):
        raise InputError(
            f"{artifact.directory}: is of another model, or of other shapes, than {first.directory}; "
            "name builds of one model"
        )
