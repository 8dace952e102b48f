"""Sampling of configurations for training a ranking: some expected to be fast, some from the whole space.

A tuner measures what it expects to be fast, which yields few and similar configurations per kernel; a ranking trained
on those cannot recognise slow ones. Here every kernel gets the same number, half of them in the order of the template's
analytic cost and half drawn from the rest of its space. Kernels alternate, so that an interrupted run has a similar
number for each.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from costmodel.model.measurements import config_key
from costmodel.operators.layers import Operator
from costmodel.operators.serialization import to_record
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.kernels.template_table import template_for
from schedules.records.record_store import RecordStore
from schedules.tuning.kernel_tuner import MeasuringRunner

# Configurations of a kernel per turn: machines drift between turns, and verification data are created for each turn.
TURN = 8


@dataclass(frozen=True)
class SamplingProgress:
    """``measured`` of ``wanted`` configurations including earlier runs; ``kernels``: number of complete kernels."""

    measured: int
    wanted: int
    kernels: int
    failures: int


@dataclass
class SampledKernel:
    """A kernel with its pending configurations, and the stores of the networks that contain it.

    ``done``: configurations of its sample that are measured or have failed.
    """

    operator: Operator
    pending: list[Config]
    stores: tuple[RecordStore, ...]
    done: int


def sample(operator: Operator, space: Sequence[Config], count: int) -> list[Config]:
    """At most ``count`` of ``space``, alternating between the next in order and a random one; deterministic."""
    fast = list(space[: -(-count // 2)])
    others = list(space[len(fast) :])
    drawn = random.Random(_name(operator)).sample(others, min(count - len(fast), len(others))) if others else []
    mixed = [config for pair in zip(fast, drawn, strict=False) for config in pair]
    return [*mixed, *fast[len(drawn) :]]


def sampled_kernels(
    stores: Iterable[tuple[RecordStore, Iterable[Operator]]], cpu: CpuTarget, count: int
) -> list[SampledKernel]:
    """Distinct kernels of the networks, with ``count`` configurations each or the whole space.

    ``stores``: the records of each network, and its kernels. Kernels without a template are left out.
    """
    found: dict[Operator, list[RecordStore]] = {}
    for store, operators in stores:
        for operator in dict.fromkeys(operators):
            if template_for(operator, cpu) is not None:
                found.setdefault(operator, []).append(store)
    kernels = [_sampled(operator, tuple(own), cpu, count) for operator, own in found.items()]
    # Shuffle, so that limited time is spread over kernels of all networks and kinds.
    random.Random(0).shuffle(kernels)
    return kernels


def _sampled(operator: Operator, stores: tuple[RecordStore, ...], cpu: CpuTarget, count: int) -> SampledKernel:
    template = template_for(operator, cpu)
    assert template is not None, "only kernels of a template are measured"
    wanted = sample(operator, template.space(operator, cpu), count)
    known = {config_key(record.config) for store in stores for record in store.all(operator)}
    known |= {config_key(failure.config) for store in stores for failure in store.failures(operator)}
    pending = [config for config in wanted if config_key(config) not in known]
    return SampledKernel(operator, pending, stores, len(wanted) - len(pending))


def measure_samples(
    kernels: Sequence[SampledKernel],
    runner: MeasuringRunner,
    end: float = math.inf,
    progress: Callable[[SamplingProgress], None] = lambda _: None,
) -> SamplingProgress:
    """Measure pending configurations until ``end`` (``time.monotonic``), kernels with the fewest results first.

    Every result is on disk at once. Kernels are compiled on all cores and timed alone.
    """
    failures = 0

    def state() -> SamplingProgress:
        done = sum(kernel.done for kernel in kernels)
        left = sum(len(kernel.pending) for kernel in kernels)
        return SamplingProgress(done, done + left, sum(not kernel.pending for kernel in kernels), failures)

    while (unfinished := [kernel for kernel in kernels if kernel.pending]) and time.monotonic() < end:
        kernel = min(unfinished, key=lambda each: each.done)
        batch, kernel.pending = kernel.pending[:TURN], kernel.pending[TURN:]
        waiting = {config_key(config): config for config in batch}
        best = [record.seconds for store in kernel.stores if (record := store.best(kernel.operator)) is not None]
        for config, outcome in runner.measure_batch(kernel.operator, batch, min(best, default=None)):
            for store in kernel.stores:
                if outcome.seconds is None:
                    store.add_failure(kernel.operator, config, outcome.error or "run", outcome.message)
                else:
                    store.add(kernel.operator, config, outcome.seconds)
            failures += outcome.seconds is None
            kernel.done += 1
            del waiting[config_key(config)]
            if time.monotonic() >= end:
                break
        kernel.pending = [*waiting.values(), *kernel.pending]
        progress(state())
    return state()


def _name(operator: Operator) -> str:
    return json.dumps(to_record(operator), sort_keys=True)
