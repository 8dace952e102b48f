"""``tune --precision auto``: layers in bfloat16 as far as the error budget lets them, raced against float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from costmodel.base.errors import TuningError
from fusion.acceptance.error_budget import BudgetExceeded, PrecisionChoice
from fusion.acceptance.final_networks import FinalNetwork, finalists
from fusion.acceptance.network_check import NetworkCheck
from fusion.acceptance.precision_choice import MOST_REBUILDS, PrecisionPlan
from fusion.acceptance.time_limit import FINAL_COMPILATION, LEAST_FINALISTS, StageClock, TimeLimit
from fusion.acceptance.tune_job import Job
from fusion.commands.tune import TuneResult, run_finals, tune_kernels, tune_profile
from fusion.commands.tune_precision import (
    FLOAT32_NETWORK,
    MixedTuning,
    PrecisionReport,
    tightened,
    tune_mixed,
    with_float32,
    with_raced,
)
from fusion.search.progress import TuningDisplay

if TYPE_CHECKING:
    from fusion.search.network_tuning import TunedKernels

STAY = "all layers stay in float32; give it more --minutes"
# Networks of the finals: of mixed layers with the selected fusions and without any, and the best in float32.
MIXED_FINALISTS = 3


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
    where its outputs are wrong, float32 is left. So it is where there is no time to build and race two networks.
    """
    limit = auto_limit(check, plan, end)
    race_end = replace(limit, end=end).race_end
    if check.careful:
        job = replace(job, guesses=job.guesses.carefully())

    def fits() -> bool:
        """Whether there is time for a mixed network and float32; who measures nothing waits for both."""
        return job.request.minutes == 0 or replace(limit, end=end).allows(LEAST_FINALISTS)

    if not fits():
        display.say(f"no time to build a network with layers in bfloat16: {STAY}")
        tuned, alone = tune_profile(job, check, end, stopped, display, clock)
        return job, tuned, alone, PrecisionReport(plan, None)

    def tune(which: Job, seconds: float | None) -> TunedKernels:
        return tune_kernels(which, seconds, display, stopped)

    found = tune_mixed(job, plan, lambda: limit.tuning_seconds, tune, display, clock)
    clock.ended("tuning")
    mixing, plain, choice = found.mixing, found.plain, found.choice
    apart = finalists(job.graph, job.sites, plain, with_partly=False)
    if mixing is not None and not fits():
        display.say(f"no time left to build a network with layers in bfloat16: {STAY}")
        mixing = None
    rebuilds = 0
    while mixing is not None:
        choice = mixing.choice
        try:
            result = _raced(job, check, plan, mixing, plain, apart, race_end, display, clock)
        except BudgetExceeded as error:
            display.say(f"{len(choice.rounded)} layers in bfloat16 err by {error.error:.2g}, more than is allowed")
            # Kernels that were compiled for these networks are there for the next.
            if rebuilds >= MOST_REBUILDS or not replace(limit, compile_seconds=0.0).allows(MIXED_FINALISTS):
                display.say(f"no time to try fewer of them: {STAY}")
                break
            rebuilds += 1
            display.say("trying fewer of them")
            mixing = tightened(job, plan, mixing, error.error, plain, tune)
            continue
        except TuningError as error:
            display.say(f"{error}; all layers stay in float32")
            break
        mixed = min(entry.median_seconds for entry in result.finals.entries if entry.name != FLOAT32_NETWORK)
        choice = with_raced(choice, mixed, result.finals.entry(FLOAT32_NETWORK).median_seconds)
        if result.finals.winner != FLOAT32_NETWORK:
            return mixing.job, mixing.tuned, result, PrecisionReport(plan, result.rounded_errors, choice)
        networks = {FLOAT32_NETWORK: result.networks[FLOAT32_NETWORK]}
        libraries = {FLOAT32_NETWORK: result.libraries[FLOAT32_NETWORK]}
        only = replace(result, networks=networks, libraries=libraries)
        return job, plain, only, PrecisionReport(plan, result.rounded_errors, _in_float32(choice), float32_won=True)
    left = replace(limit, end=end, compile_seconds=0.0)
    result = run_finals(job, apart if left.allows(len(apart)) else apart[-1:], plain, check, race_end, display, clock)
    return job, plain, result, PrecisionReport(plan, None, _in_float32(choice))


def auto_limit(check: NetworkCheck, plan: PrecisionPlan, end: float) -> TimeLimit:
    """What the finals of mixed networks and the one in float32 need at most, as far as the first network tells.

    Besides three networks to build and check: draws of what rounding does to the outputs, and float32 by itself once
    more, should the mixed ones err more than is allowed.
    """
    cost = check.cost
    runs = plan.limit.runs
    draws = 0.0 if runs is None else len(check.outputs.expected) * runs.draw_seconds
    return TimeLimit(
        end=end - draws - cost.other_seconds,
        check_seconds=cost.other_seconds,
        extra_checks=len(check.exposes[:1]),
        compile_seconds=cost.compile_seconds,  # no kernel in bfloat16 is there yet
        run_seconds=cost.run_seconds,
        finalists=MIXED_FINALISTS,
        most_compile_seconds=2.0 * FINAL_COMPILATION * cost.compile_seconds,
    )


def _in_float32(choice: PrecisionChoice) -> PrecisionChoice:
    """``choice``, of which nothing is shipped in the end."""
    points = tuple(replace(each, chosen=not each.rounded) for each in choice.frontier)
    return replace(choice, rounded=frozenset(), kept=tuple(choice.sensitivity), error=0.0, frontier=points)


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
