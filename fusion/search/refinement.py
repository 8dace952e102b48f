"""The configurations of a whole network improved where they run, a few kernels at a time.

What a kernel costs depends on the kernels beside it: rows that another core wrote come from that core's cache, so that
a 1x1 which splits its channels over the cores makes the depthwise layer behind it, which splits rows, slower than one
that splits rows too. No time of a kernel in some other network tells that. Here a change is judged by the kernel and
by all that read its output, with everything else as it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from costmodel.model.measurements import config_key
from costmodel.operators.layers import Operator
from fusion.model.timed_network import Variant
from schedules.contract.template import Config
from schedules.measuring.measure_messages import KernelProgram, MeasureOutcome

# Changes that are found good are made and tried together with others again, so often at most.
SWEEPS = 3
# A change must save this share of the kernels that it concerns; what is less may be chance.
LEAST_GAIN = 0.01

# Outcomes of networks that take turns, in their order; and whether there is time for that.
Measure = Callable[[Sequence[Variant]], Sequence[MeasureOutcome]]
Affordable = Callable[[Sequence[Variant]], bool]


@dataclass(frozen=True)
class ConfigChange:
    """``operator`` in ``config`` saves ``seconds`` of the network, its readers included."""

    operator: Operator
    config: Config
    seconds: float


def refine(
    chosen: Variant,
    pool: Mapping[Operator, Sequence[Config]],
    measure: Measure,
    affordable: Affordable = lambda tried: True,
) -> Variant:
    """``chosen`` with other configurations of ``pool`` where they save time; itself if it is no slower as a whole.

    Nothing more is tried once a trial is not ``affordable``.
    """
    best = chosen
    for _ in range(SWEEPS):
        changes = improvements(best, pool, measure, affordable)
        if not changes:
            break
        configs = {**best.configs, **{change.operator: change.config for change in changes}}
        best = Variant(best.plan, configs)
    if best is chosen:
        return chosen
    before, after = (outcome.seconds for outcome in measure([chosen, best]))
    return best if after is not None and (before is None or after < before) else chosen


def improvements(
    chosen: Variant,
    pool: Mapping[Operator, Sequence[Config]],
    measure: Measure,
    affordable: Affordable = lambda tried: True,
) -> list[ConfigChange]:
    """Changes that save time and do not concern each other, the largest first."""
    neighbours = Neighbours(chosen.program())
    tried = list(trials(chosen, pool, neighbours))
    networks = [chosen, *(Variant(chosen.plan, {**chosen.configs, **changed}) for changed in tried)]
    if not tried or not affordable(networks):
        return []
    base, *others = measure(networks)
    if base.seconds is None:
        return []
    found: list[ConfigChange] = []
    for changed, outcome in zip(tried, others, strict=True):
        if outcome.seconds is None:
            continue
        for operator, config in changed.items():
            concerned = neighbours.concerned(operator)
            before = sum(base.step_seconds[index] for index in concerned)
            saved = before - sum(outcome.step_seconds[index] for index in concerned)
            if saved > LEAST_GAIN * before:
                found.append(ConfigChange(operator, config, saved))
    accepted: list[ConfigChange] = []
    for change in sorted(found, key=lambda each: -each.seconds):
        if not any(neighbours.interact(change.operator, other.operator) for other in accepted):
            accepted.append(change)
    return accepted


def trials(
    chosen: Variant, pool: Mapping[Operator, Sequence[Config]], neighbours: Neighbours
) -> Iterator[dict[Operator, Config]]:
    """Sets of changes that do not concern each other; together every other configuration of ``pool``."""
    left = {
        operator: [config for config in pool.get(operator, ()) if config_key(config) != config_key(own)]
        for operator, own in chosen.configs.items()
        if operator in neighbours
    }
    while any(left.values()):
        changed: dict[Operator, Config] = {}
        for operator in sorted(left, key=lambda each: -len(left[each])):
            if left[operator] and not any(neighbours.interact(operator, other) for other in changed):
                changed[operator] = left[operator].pop(0)
        yield changed


class Neighbours:
    """Which kernels of a program read what others write."""

    def __init__(self, program: KernelProgram) -> None:
        self._places: dict[Operator, set[int]] = {}
        readers: dict[int, set[int]] = {}
        for index, step in enumerate(program):
            self._places.setdefault(step.candidate[0], set()).add(index)
            for source in step.sources:
                if source is not None:
                    readers.setdefault(source, set()).add(index)
        self._concerned = {
            operator: places.union(*(readers.get(place, set()) for place in places))
            for operator, places in self._places.items()
        }

    def __contains__(self, operator: Operator) -> bool:
        return operator in self._places

    def concerned(self, operator: Operator) -> set[int]:
        """Steps whose time a change of ``operator`` may alter: its own and those that read its output."""
        return self._concerned[operator]

    def interact(self, one: Operator, other: Operator) -> bool:
        """Whether some step is concerned by a change of either. A kernel interacts with itself."""
        return not self._concerned[one].isdisjoint(self._concerned[other])
