"""Selection of the next configurations of a kernel, and of the next kernel."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from costmodel.cost_model import ConfigKey, Measurement, config_key
from costmodel.operators.layers import Operator
from schedules.contract.template import Config

# Share of random configurations while a kernel family is unknown to the model.
UNINFORMED_EXPLORATION = 0.3


@runtime_checkable
class Ranker(Protocol):
    """Interface of a learned cost model used by the tuner."""

    def rank(self, operator: Operator, configs: Sequence[Config]) -> Sequence[int]:
        """Indices into ``configs``, expected fastest first; the given order means no prediction."""
        ...

    def update(self, measurements: Iterable[Measurement]) -> None:
        """Train on these measurements, in addition to earlier ones."""
        ...


@dataclass
class TaskState:
    """A kernel being tuned: its space, measured configurations, and history."""

    operator: Operator
    occurrences: int
    # Maximum number of measured configurations, earlier runs included.
    trials: int
    space: Sequence[Config]
    measured: set[ConfigKey] = field(default_factory=set)
    # Best seconds after every successful trial.
    history: list[float] = field(default_factory=list)
    # Algorithm of a configuration, if the space has several.
    algorithm: Callable[[Config], str] = lambda config: ""
    # Configurations measured before any ranking.
    first: Sequence[Config] = ()
    # Configurations of the operator measured on the same kind of CPU before, which reduces the expected gain.
    elsewhere: int = 0

    @property
    def best_seconds(self) -> float | None:
        """Fastest time so far in seconds, or None before the first."""
        return self.history[-1] if self.history else None

    @property
    def left(self) -> int:
        """Number of remaining trials."""
        return max(0, min(self.trials, len(self.space)) - len(self.measured))

    def note(self, config: Mapping[str, int], seconds: float | None) -> None:
        """Record a trial; ``seconds`` None: it failed."""
        self.measured.add(config_key(config))
        if seconds is not None:
            self.history.append(min(seconds, self.history[-1] if self.history else seconds))

    def untried_algorithms(self) -> set[str]:
        """Algorithms without a measured configuration; empty if there is only one."""
        known = {self.algorithm(config) for config in self.space}
        return known - {self.algorithm(dict(key)) for key in self.measured} if len(known) > 1 else set()

    def expected_gain(self, window: int = 16, trust: float = 0.5) -> float:
        """Seconds per network run that one more trial may save.

        As in the gradient scheduler of Ansor (Zheng et al., OSDI 2020, section 6): ``trust`` times the slope over the
        last ``window`` trials, and for the rest the optimistic assumption that the best time falls by ``1/n`` at trial
        n.
        """
        if not self.history:
            return float("inf")
        count = max(1, len(self.measured) + self.elsewhere)
        recent = self.history[-min(window, len(self.history)) :]
        slope = (recent[0] - recent[-1]) / len(recent)
        return self.occurrences * (trust * slope + (1.0 - trust) * recent[-1] / count)


def next_task(states: Sequence[TaskState], minimum: int) -> TaskState | None:
    """Next kernel: first those with fewer than ``minimum`` trials, then the one with the largest expected gain."""
    open_states = [state for state in states if state.left]
    if not open_states:
        return None
    behind = [state for state in open_states if len(state.measured) < minimum]
    if behind:
        return min(behind, key=lambda state: len(state.measured))
    return max(open_states, key=lambda state: state.expected_gain())


def next_batch(state: TaskState, ranker: Ranker, size: int, exploration: float, rng: random.Random) -> list[Config]:
    """Up to ``size`` unmeasured configurations: those of ``state.first``, then the best ranked, with a share of random
    ones.

    While the ranker has no prediction, the order of the space is used (the template's analytic cost), with more random
    ones. Configurations that differ from one in the batch in a single knob are postponed: both together give the model
    little more information than one. An untried algorithm comes first, with its best ranked configuration: analytic
    costs are least reliable between algorithms.
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
    # The first configurations include the best of each algorithm in the records.
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
