"""Configurations measured so that a ranking learns from them: some that should be fast, and some from all over.

A tuner measures what it expects to be fast, and leaves a few configurations of a kernel that hardly differ: nothing
tells an order that is learned from those what is slow. Here every kernel gets as many, half of them in the order of the
template's analytic cost and half drawn from the rest of its space. Kernels take turns, so that a run that is stopped
has as many of each.
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

# Configurations of a kernel in one turn: a machine drifts between turns, and what verifies a kernel is made anew.
TURN = 8


@dataclass(frozen=True)
class SamplingProgress:
    """``measured`` of ``wanted`` configurations, those of earlier runs included; ``kernels`` have all of theirs."""

    measured: int
    wanted: int
    kernels: int
    failures: int


@dataclass
class SampledKernel:
    """A kernel, what is still to be measured of it, and the stores of the networks that it occurs in.

    ``done``: configurations of its sample that are measured or have failed.
    """

    operator: Operator
    pending: list[Config]
    stores: tuple[RecordStore, ...]
    done: int


def sample(operator: Operator, space: Sequence[Config], count: int) -> list[Config]:
    """At most ``count`` of ``space``: by turns the next in its order and a random one; always the same."""
    fast = list(space[: -(-count // 2)])
    others = list(space[len(fast) :])
    drawn = random.Random(_name(operator)).sample(others, min(count - len(fast), len(others))) if others else []
    mixed = [config for pair in zip(fast, drawn, strict=False) for config in pair]
    return [*mixed, *fast[len(drawn) :]]


def sampled_kernels(
    stores: Iterable[tuple[RecordStore, Iterable[Operator]]], cpu: CpuTarget, count: int
) -> list[SampledKernel]:
    """Every kernel of the networks once, with ``count`` configurations or all that there are. ``stores``: the records
    of each network, and its kernels. Those without a template are left out.
    """
    found: dict[Operator, list[RecordStore]] = {}
    for store, operators in stores:
        for operator in dict.fromkeys(operators):
            if template_for(operator, cpu) is not None:
                found.setdefault(operator, []).append(store)
    kernels = [_sampled(operator, tuple(own), cpu, count) for operator, own in found.items()]
    # Whatever time there is, it is spent on kernels of all networks and kinds.
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
    """Measures what is pending until ``end`` on the clock of ``time.monotonic``, the kernel of which least is known
    next; every result is on disk at once. What a worker compiles is compiled on all cores and timed alone on them.
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
