"""Which configurations of one kernel to measure next, and which kernel to work on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from costmodel.model.measurements import ConfigKey, Measurement, config_key
from costmodel.operators.layers import Operator
from schedules.contract.template import Config

# Share of random configurations while nothing has been learned of a kernel family.
UNINFORMED_EXPLORATION = 0.3


@runtime_checkable
class Ranker(Protocol):
    """What the tuner asks of a cost model that learns."""

    def rank(self, operator: Operator, configs: Sequence[Config]) -> Sequence[int]:
        """Indices into ``configs``, the one expected to be fastest first; the given order: no opinion."""
        ...

    def update(self, measurements: Iterable[Measurement]) -> None:
        """Learns from these measurements, and keeps what it learned before."""
        ...


@dataclass
class TaskState:
    """A kernel being tuned: its space, what has been measured, and how the best time came down.

    ``history``: best seconds after every successful trial. ``trials``: how many may be measured in all, those of
    earlier runs included. ``algorithm``: that of a configuration, where the space holds more than one. ``first``: what
    is measured before anything is ranked; ``elsewhere``: configurations of the operator that were measured on such a
    CPU before, so that less is to be gained here.
    """

    operator: Operator
    occurrences: int
    trials: int
    space: Sequence[Config]
    measured: set[ConfigKey] = field(default_factory=set)
    history: list[float] = field(default_factory=list)
    algorithm: Callable[[Config], str] = lambda config: ""
    first: Sequence[Config] = ()
    elsewhere: int = 0

    @property
    def best_seconds(self) -> float | None:
        """The fastest time so far in seconds; ``None`` before the first."""
        return self.history[-1] if self.history else None

    @property
    def left(self) -> int:
        """Trials that may still be measured."""
        return max(0, min(self.trials, len(self.space)) - len(self.measured))

    def note(self, config: Mapping[str, int], seconds: float | None) -> None:
        """A trial was measured; ``None``: it failed."""
        self.measured.add(config_key(config))
        if seconds is not None:
            self.history.append(min(seconds, self.history[-1] if self.history else seconds))

    def untried_algorithms(self) -> set[str]:
        """Those of which no configuration has been measured; none where there is no choice."""
        known = {self.algorithm(config) for config in self.space}
        return known - {self.algorithm(dict(key)) for key in self.measured} if len(known) > 1 else set()

    def expected_gain(self, window: int = 16, trust: float = 0.5) -> float:
        """Seconds per network run that one more trial may save.

        As the gradient scheduler of Ansor (Zheng et al., OSDI 2020, section 6): ``trust`` times the slope over the
        last ``window`` trials, and for the rest the optimistic guess that the best time falls by ``1/n`` at trial n.
        """
        if not self.history:
            return float("inf")
        count = max(1, len(self.measured) + self.elsewhere)
        recent = self.history[-min(window, len(self.history)) :]
        slope = (recent[0] - recent[-1]) / len(recent)
        return self.occurrences * (trust * slope + (1.0 - trust) * recent[-1] / count)


def next_task(states: Sequence[TaskState], minimum: int) -> TaskState | None:
    """The kernel to work on: first those under ``minimum`` trials, then where most is to be gained."""
    open_states = [state for state in states if state.left]
    if not open_states:
        return None
    behind = [state for state in open_states if len(state.measured) < minimum]
    if behind:
        return min(behind, key=lambda state: len(state.measured))
    return max(open_states, key=lambda state: state.expected_gain())


def next_batch(state: TaskState, ranker: Ranker, size: int, exploration: float, rng: random.Random) -> list[Config]:
    """Up to ``size`` unmeasured configurations: what the state names first, then the best ranked, and random ones at a
    share of ``exploration``.

    While the ranker has no opinion the order of the space stands (the template's analytic cost), explored more widely.
    Configurations that differ from one already in the batch in a single knob are put off: measuring both before the
    model has seen either tells little more than measuring one. An algorithm that has not been tried comes first, with
    what is ranked best of it: how algorithms stand to each other is what an analytic cost tells worst.
    """
    size = min(size, state.left)
    batch = [config for config in state.first if config_key(config) not in state.measured][:size]
    if len(batch) == size:
        return batch
    seen = state.measured | {config_key(config) for config in batch}
    fresh = [config for config in state.space if config_key(config) not in seen]
    order = list(ranker.rank(state.operator, fresh))
    if order == list(range(len(fresh))):
        exploration = max(exploration, UNINFORMED_EXPLORATION)
    ranked = [fresh[index] for index in order]
    # What is measured first has the best of each algorithm that the records know.
    untried = state.untried_algorithms() - {state.algorithm(config) for config in batch}
    while ranked and len(batch) < size:
        if untried:
            index = next(i for i, config in enumerate(ranked) if state.algorithm(config) in untried)
            untried.remove(state.algorithm(ranked[index]))
        elif rng.random() < exploration:
            index = rng.randrange(len(ranked))
        else:
            index = next((i for i, config in enumerate(ranked) if not _near(config, batch)), 0)
        batch.append(ranked.pop(index))
    return batch


def _near(config: Config, batch: Sequence[Config]) -> bool:
    return any(
        config.keys() == other.keys() and sum(config[knob] != other[knob] for knob in config) <= 1 for other in batch
    )
