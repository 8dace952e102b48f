"""``tune --precision auto``: layers in bfloat16 within an error budget, compared with float32.

The error of every layer is measured, kernels of both number types are tuned, layers are selected by measured times
within the budget, and the result is timed against the float32 network: it is never slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from costmodel.base.errors import TuningError
from fusion.acceptance.error_budget import BudgetExceeded, PrecisionChoice, sensitivities
from fusion.model.conv_graph import BFLOAT16, layers_in
from fusion.tuning.clock import FINAL_COMPILATION, LEAST_FINALISTS, TimeLimit
from fusion.tuning.finals import FLOAT32_NETWORK, FinalNetwork, TuneResult, finalists
from fusion.tuning.job import TuningJob
from fusion.tuning.network import Network
from fusion.tuning.precision import (
    LEAST_ERROR_SECONDS,
    MOST_REBUILDS,
    PrecisionChooser,
    PrecisionPlan,
    PrecisionReport,
    error_seconds,
    ordered,
    with_raced,
)

if TYPE_CHECKING:
    from fusion.tuning.network_tuning import TunedKernels

STAY = "all layers stay in float32; give it more --minutes"
# Networks of the finals: mixed with the selected fusions, mixed without fusion, and the best in float32.
MIXED_FINALISTS = 3
# Share of bfloat16 kernels in the kernel tuning time.
ROUNDED_SHARE = 0.6


@dataclass(frozen=True, eq=False)
class MixedNetwork:
    """A network with the layers of ``choice`` in bfloat16, and its tuned kernels."""

    network: Network
    tuned: TunedKernels
    choice: PrecisionChoice


@dataclass(frozen=True)
class MixedSearch:
    """Kernels in float32 (``plain``), the mixed network (None if no layer gains), and the precision choice."""

    mixed: MixedNetwork | None
    plain: TunedKernels
    choice: PrecisionChoice


class MixedJob(TuningJob):
    """One network tuned for this CPU in the number types that are fastest within the error budget.

    A network with too large errors is built again with fewer layers in bfloat16, a limited number of times. After that,
    with wrong outputs, or without time to build and compare two networks, float32 is used.
    """

    found: MixedSearch | None = None  # None: no time for a mixed network

    @property
    def precision(self) -> PrecisionPlan:
        """The precision plan of the request."""
        assert self.plan is not None, "prepare() comes first"
        return self.plan

    def search(self, end: float) -> None:
        self.end = end
        if not self._fits():
            self.display.say(f"no time to build a network with layers in bfloat16: {STAY}")
            super().search(end)
            return
        self.announce()
        self.avoid_rounding()
        self.found = search_mixed(self, self.precision, lambda: self.mixed_limit().tuning_seconds)
        self.clock.ended("tuning")

    def finals(self) -> None:
        if self.found is None:
            super().finals()
            self.report = PrecisionReport(self.precision, None)
            return
        mixed, choice = self.found.mixed, self.found.choice
        self.tuned = self.found.plain
        apart = finalists(self.network.graph, self.network.sites, self.tuned, with_partly=False)
        if mixed is not None and not self._fits():
            self.display.say(f"no time left to build a network with layers in bfloat16: {STAY}")
            mixed = None
        rebuilds = 0
        while mixed is not None:
            choice = mixed.choice
            try:
                result = self._race_mixed(mixed, apart[-1])
            except BudgetExceeded as error:
                count = len(choice.rounded)
                self.display.say(f"{count} layers in bfloat16 err by {error.error:.2g}, more than is allowed")
                # Kernels compiled for these networks are reused for the next.
                if rebuilds >= MOST_REBUILDS or not self._allows(MIXED_FINALISTS, draws=True):
                    self.display.say(f"no time to try fewer of them: {STAY}")
                    break
                rebuilds += 1
                self.display.say("trying fewer of them")
                mixed = tighten(self, self.precision, mixed, error.error)
            except TuningError as error:
                self.display.say(f"{error}; all layers stay in float32")
                break
            else:
                self._ship(mixed, result)
                return
        networks = apart if self._allows(len(apart)) else apart[-1:]
        self.result = self.race(networks, self._race_end)
        self.report = PrecisionReport(self.precision, None, _in_float32(choice))

    def mixed_limit(self) -> TimeLimit:
        """Time limit with the maximum needs of the finals of mixed networks and float32, estimated from the first
        network.

        Besides building and checking three networks, it includes the runs that estimate rounding errors, and another
        check of float32 in case the mixed networks have too large errors.
        """
        cost, runs = self.check.cost, self.precision.limit.runs
        draws = 0.0 if runs is None else len(self.check.outputs.expected) * runs.draw_seconds
        return TimeLimit(
            end=self.end - draws - cost.other_seconds,
            check_seconds=cost.other_seconds,
            extra_checks=len(self.check.exposes[:1]),
            compile_seconds=cost.compile_seconds,  # no bfloat16 kernel is compiled yet
            run_seconds=cost.run_seconds,
            finalists=MIXED_FINALISTS,
            most_compile_seconds=2.0 * FINAL_COMPILATION * cost.compile_seconds,
        )

    @property
    def _race_end(self) -> float:
        return replace(self.mixed_limit(), end=self.end).race_end

    def _fits(self) -> bool:
        """True if there is time for a mixed network and float32; always if nothing is measured."""
        limit = replace(self.mixed_limit(), end=self.end)
        return self.network.request.minutes == 0 or limit.allows(LEAST_FINALISTS)

    def _allows(self, networks: int, draws: bool = False) -> bool:
        """True if there is time for ``networks`` networks with compiled kernels, and for ``draws`` of rounding
        errors.
        """
        limit = replace(self.mixed_limit(), compile_seconds=0.0)
        return (limit if draws else replace(limit, end=self.end)).allows(networks)

    def _race_mixed(self, mixed: MixedNetwork, plain: FinalNetwork) -> TuneResult:
        """Finals of the mixed networks and ``plain``, the best one in float32, which is checked with float32
        tolerances.
        """
        network, limit = mixed.network, self.precision.limit
        own = finalists(network.graph, network.sites, mixed.tuned, with_partly=False)
        alone = replace(self.check, rounded=replace(limit, max_error=None))
        check = self.check.with_rounded(layers_in(network.graph, BFLOAT16), limit)
        check = replace(check, apart={FLOAT32_NETWORK: alone})
        tuned = replace(
            mixed.tuned,
            unsolved=(*mixed.tuned.unsolved, *self.tuned.unsolved),
            careful={**self.tuned.careful, **mixed.tuned.careful},
        )
        return self.of(network, tuned, check).race([*own, replace(plain, name=FLOAT32_NETWORK)], self._race_end)

    def _ship(self, mixed: MixedNetwork, result: TuneResult) -> None:
        """Ship the fastest network of ``result``, mixed or in float32."""
        entries = result.finals.entries
        fastest = min(entry.median_seconds for entry in entries if entry.name != FLOAT32_NETWORK)
        choice = with_raced(mixed.choice, fastest, result.finals.entry(FLOAT32_NETWORK).median_seconds)
        if result.finals.winner != FLOAT32_NETWORK:
            self.network, self.tuned, self.result = mixed.network, mixed.tuned, result
            self.report = PrecisionReport(self.precision, result.rounded_errors, choice)
            return
        networks = {FLOAT32_NETWORK: result.networks[FLOAT32_NETWORK]}
        libraries = {FLOAT32_NETWORK: result.libraries[FLOAT32_NETWORK]}
        self.result = replace(result, networks=networks, libraries=libraries)
        errors = result.rounded_errors
        self.report = PrecisionReport(self.precision, errors, _in_float32(choice), float32_won=True)


def search_mixed(job: TuningJob, plan: PrecisionPlan, left: Callable[[], float | None]) -> MixedSearch:
    """Tune kernels of the layers allowed in bfloat16 and in float32, and select the best by their times.

    ``left()``: seconds available from now on.
    """
    network, display, clock = job.network, job.display, job.clock
    seconds = error_seconds(network.request.minutes, left())
    assert plan.limit.runs is not None, "errors of single layers are measured"
    layers = [name for name in plan.limit.runs.layers if name in plan.layers]
    sensitivity = sensitivities(plan.limit.measured, layers, seconds)
    chooser = PrecisionChooser(network.graph, network.target, plan, seconds)
    choice = chooser.chosen(sensitivity, {})
    clock.ended("errors")
    if not choice.rounded:
        display.say("no layer is worth its error in bfloat16, or none is predicted to gain: all stay in float32")
        choice = replace(choice, frontier=chooser.frontier(sensitivity, {}, choice))
        return MixedSearch(None, job.measure(network, left()), choice)
    display.say(_announced(choice, len(network.graph.nodes)))
    mixed = _stored(network, chooser, choice.rounded)
    tuned = first = job.measure(mixed, _share(left(), seconds, ROUNDED_SHARE))
    plain = job.measure(network, 0.0 if first.interrupted else _share(left(), seconds))
    measured = {**tuned.seconds, **plain.seconds}
    clock.ended("tuning")
    allowed = {name: error for name, error in sensitivity.items() if name in choice.rounded}
    better = chooser.chosen(allowed, measured)
    better = replace(
        better,
        sensitivity=sensitivity,
        kept=tuple(name for name in sensitivity if name not in better.rounded),
        frontier=chooser.frontier(sensitivity, measured, better),
    )
    clock.ended("errors")
    if not better.rounded:
        display.say("no layer measured faster in bfloat16: all stay in float32")
        return MixedSearch(None, plain, better)
    if better.rounded != choice.rounded:
        display.say(_announced(better, len(network.graph.nodes)))
        mixed = _stored(network, chooser, better.rounded)
        tuned = job.measure(mixed, _no_more(left()))
    trials, failures = first.trials + plain.trials, first.failures + plain.failures
    interrupted = first.interrupted or plain.interrupted
    tuned, plain = (replace(each, trials=trials, failures=failures, interrupted=interrupted) for each in (tuned, plain))
    return MixedSearch(MixedNetwork(mixed, tuned, better), plain, better)


def tighten(job: TuningJob, plan: PrecisionPlan, mixed: MixedNetwork, error: float) -> MixedNetwork | None:
    """New choice with a smaller budget, reduced by the ratio of measured to expected error of the built network.

    ``job``: the float32 job. None if no layer remains.
    """
    limit = plan.limit.max_error
    assert limit is not None, "without a limit no error exceeds it"
    network, before = job.network, mixed.choice
    allowed = {name: each for name, each in before.sensitivity.items() if name in before.rounded}
    smaller = 0.9 * limit * before.error / max(error, before.error, 1e-30)
    plan = replace(plan, limit=replace(plan.limit, max_error=smaller))
    chooser = PrecisionChooser(network.graph, network.target, plan, LEAST_ERROR_SECONDS)
    measured = {**mixed.tuned.seconds, **job.tuned.seconds}
    choice = chooser.chosen(allowed, measured)
    if not choice.rounded or choice.rounded == before.rounded:
        return None
    others = [replace(each, chosen=False) for each in before.frontier]
    choice = replace(
        choice,
        sensitivity=before.sensitivity,
        kept=tuple(name for name in before.sensitivity if name not in choice.rounded),
        frontier=ordered([*others, chooser.point(choice.rounded, True, measured)]),
    )
    fewer = _stored(network, chooser, choice.rounded)
    return MixedNetwork(fewer, job.measure(fewer, _no_more(network.request.minutes)), choice)


def _in_float32(choice: PrecisionChoice) -> PrecisionChoice:
    """``choice`` without layers in the shorter type."""
    points = tuple(replace(each, chosen=not each.rounded) for each in choice.frontier)
    return replace(choice, rounded=frozenset(), kept=tuple(choice.sensitivity), error=0.0, frontier=points)


def _announced(choice: PrecisionChoice, layers: int) -> str:
    return (
        f"{len(choice.rounded)} of {layers} layers in bfloat16: an error of {choice.error:.2g} of the largest value is "
        "expected"
    )


def _stored(network: Network, chooser: PrecisionChooser, rounded: Collection[str]) -> Network:
    """``network`` with the layers ``rounded`` and their followers in the shorter type."""
    return network.stored(chooser.with_followers(rounded), chooser.plan.dtype)


def _share(left: float | None, kept: float, share: float = 1.0) -> float | None:
    """``share`` of the remaining seconds for kernels, without those ``kept`` for the choice after them."""
    return None if left is None else share * max(0.0, left - kept)


def _no_more(limit: float | None) -> float | None:
    """Seconds for a network whose kernels are all measured: 0 with a limit, None without."""
    return None if limit is None else 0.0
