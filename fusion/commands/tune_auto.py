"""``tune --precision auto``: layers in bfloat16 as far as the error budget lets them, raced against float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.base.errors import TuningError
from fusion.acceptance.error_budget import BudgetExceeded
from fusion.acceptance.final_networks import FinalNetwork, finalists
from fusion.acceptance.network_check import NetworkCheck
from fusion.acceptance.time_limit import FINAL_COMPILATION, StageClock, TimeLimit
from fusion.acceptance.tune_job import Job
from fusion.commands.tune import TuneResult, run_finals, tune_kernels
from fusion.commands.tune_precision import (
    FLOAT32_NETWORK,
    MOST_REBUILDS,
    MixedTuning,
    PrecisionPlan,
    PrecisionReport,
    tightened,
    tune_mixed,
    with_float32,
)
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from fusion.search.network_tuning import TunedKernels


def tune_auto(
    job: Job,
    check: NetworkCheck,
    plan: PrecisionPlan,
    end: float,
    stopped: bool,
    display: TuningDisplay,
    clock: StageClock,
) -> tuple[Job, TunedKernels, TuneResult, PrecisionReport]:
    """Tunes, chooses and races; ``job`` and ``check`` are those of float32. The job of what was shipped comes first.

    A network that errs more than allowed is built again with fewer layers in bfloat16, a few times at most; then, or
    where its outputs are wrong, float32 is left.
    """
    cost = check.cost
    compilation = FINAL_COMPILATION * cost.compile_seconds
    limit = TimeLimit(end, cost.other_seconds, len(check.exposes[:1]), 2.0 * compilation, cost.run_seconds)
    if check.careful:
        job = replace(job, guesses=job.guesses.carefully())

    def tune(which: Job, seconds: float | None) -> TunedKernels:
        return tune_kernels(which, seconds, display, stopped)

    def left() -> float | None:
        seconds = limit.tuning_seconds  # the finals have one network more than otherwise
        return None if seconds is None else max(0.0, seconds - cost.other_seconds)

    mixing, plain = tune_mixed(job, plan, left, tune, display)
    clock.ended("tuning")
    choice = None if mixing is None else mixing.choice
    apart = finalists(job.graph, job.sites, plain, with_partly=False)
    for _ in range(MOST_REBUILDS + 1):
        if mixing is None:
            break
        choice = mixing.choice
        try:
            result = _raced(job, check, plan, mixing, plain, apart, limit.race_end, display, clock)
        except BudgetExceeded as error:
            display.say(f"{len(choice.rounded)} layers in bfloat16 err by {error.error:.2g}: trying fewer of them")
            mixing = tightened(job, plan, mixing, error.error, plain, tune)
            continue
        except TuningError as error:
            display.say(f"{error}; all layers stay in float32")
            break
        if result.finals.winner != FLOAT32_NETWORK:
            return mixing.job, mixing.tuned, result, PrecisionReport(plan, result.rounded_errors, choice)
        alone = {FLOAT32_NETWORK: result.networks[FLOAT32_NETWORK]}
        libraries = {FLOAT32_NETWORK: result.libraries[FLOAT32_NETWORK]}
        only = replace(result, networks=alone, libraries=libraries)
        return job, plain, only, PrecisionReport(plan, result.rounded_errors, choice, float32_won=True)
    result = run_finals(job, apart, plain, check, limit.race_end, display, clock)
    return job, plain, result, PrecisionReport(plan, None, choice)


def _raced(
    job: Job,
    check: NetworkCheck,
    plan: PrecisionPlan,
    mixing: MixedTuning,
    plain: TunedKernels,
    apart: Sequence[FinalNetwork],
    end: float,
    display: TuningDisplay,
    clock: StageClock,
) -> TuneResult:
    """The finals of the mixed networks and the best one in float32."""
    mixed = mixing.job
    own = finalists(mixed.graph, mixed.sites, mixing.tuned, with_partly=False)
    checks, networks = with_float32(check, plan, mixing, own, apart[-1])
    tuned = replace(
        mixing.tuned,
        unsolved=(*mixing.tuned.unsolved, *plain.unsolved),
        careful={**plain.careful, **mixing.tuned.careful},
    )
    return run_finals(mixed, networks, tuned, checks, end, display, clock)
