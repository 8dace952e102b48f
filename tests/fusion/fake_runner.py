"""A runner and a cost model whose answers the test says: no compiler, no clock."""

from __future__ import annotations

from collections.abc import Callable

from costmodel.operators.layers import Operator
from schedules.measuring.measure_runner import Runner
from schedules.measuring.timing_protocol import MeasureOutcome


class FakeRunner:
    """Every configuration of an operator takes ``seconds(operator)``; in a network, ``network(operator)``."""

    def __init__(
        self, seconds: Callable[[Operator], float], network: Callable[[Operator], float] | None = None
    ) -> None:
        self.seconds, self.network = seconds, network or seconds
        self.measured: list[Operator] = []
        self.rehearsed: list[tuple[Operator, ...]] = []
        self.stop_after: int | None = None

    def measure(self, operator, config, best_seconds=None):
        if self.stop_after is not None and len(self.measured) >= self.stop_after:
            raise KeyboardInterrupt
        self.measured.append(operator)
        return MeasureOutcome(self.seconds(operator))

    measure_batch = Runner.measure_batch  # one after the other

    def compile_together(self, candidates):
        pass

    def compilation_seconds(self, candidates):
        return 0.0

    def compare(self, arms):
        return [MeasureOutcome(sum(self.seconds(operator) for operator, _ in arm)) for arm in arms]

    def rehearse(self, programs, rounds=5, runs=12):
        self.rehearsed += [tuple(step.candidate[0] for step in program) for program in programs]
        times = [tuple(self.network(step.candidate[0]) for step in program) for program in programs]
        return [MeasureOutcome(sum(steps), step_seconds=steps) for steps in times]


class NoOpinion:
    def rank(self, operator, configs):
        return list(range(len(configs)))

    def update(self, measurements):
        pass
