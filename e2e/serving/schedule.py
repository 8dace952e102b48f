"""The scheduler of an engine: which prompts and sequences each step computes, from the first request to the last.

Steps in which nothing changes are taken together: between two events (a sequence ends, a request arrives) only the
contexts grow, so their seconds are those of the middle one.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from e2e.serving.engines import Engine
from e2e.serving.step_price import Prompt, StepPrice
from e2e.serving.workload import Workload

# Contexts grow by this share at most in steps that are taken together.
_GROWTH = 0.1


@dataclass
class ServedRun:
    """What clients saw: arrays over the requests, in seconds since the start."""

    sent: np.ndarray
    first: np.ndarray
    last: np.ndarray
    # Seconds between tokens of one sequence, and how many tokens came after that time.
    gaps: list[float] = field(default_factory=list)
    gap_tokens: list[float] = field(default_factory=list)
    # Seconds in which the engine computed, and tokens that were in the cache at the busiest moment.
    busy: float = 0.0
    most_cached: int = 0
    preempted: int = 0
    steps: int = 0


@dataclass(slots=True)
class _Sequence:
    number: int
    prompt: int  # tokens to compute before the first output
    done: int = 0  # of them
    left: int = 0  # outputs after the first


class Scheduler:
    """Continuous batching of one engine: the state between two steps."""

    def __init__(self, price: StepPrice, room: int, workload: Workload) -> None:
        self.price, self.engine, self.room = price, price.engine, room
        self.load = workload
        count = workload.count
        self.run = ServedRun(np.zeros(count), np.zeros(count), np.zeros(count))
        self.inputs, self.outputs = workload.inputs.tolist(), workload.outputs.tolist()
        self.now = 0.0
        self.ticks = 0  # decoding steps so far
        self.waiting: deque[_Sequence] = deque()
        self.filling: deque[_Sequence] = deque()  # prompts that are partly computed
        self.ending: list[tuple[int, int, int]] = []  # (tick, request, context at tick 0) of decoding sequences
        self.contexts = 0  # sum of the contexts of decoding sequences, at tick 0
        self.cached = 0  # tokens of all admitted sequences at their ends: what the cache must hold
        self.next = 0
        self.ended = 0
        self.pause = 0.0  # seconds since the last token of the decoding sequences

    def serve(self) -> ServedRun:
        """Serve all requests."""
        load = self.load
        first = load.concurrency if load.arrivals is None else 0
        for _ in range(first):
            self._send(0.0)
        while self.ended < load.count:
            self._arrive()
            prompts = self._prompts()
            if prompts:
                self._step(prompts)
            elif self.ending:
                self._decode()
            else:
                self.now = max(self.now, float(load.arrivals[self.next]))  # type: ignore[index]
        return self.run

    def _send(self, when: float) -> None:
        number = self.next
        self.next += 1
        self.run.sent[number] = when
        self.waiting.append(_Sequence(number, self.inputs[number], 0, self.outputs[number] - 1))

    def _arrive(self) -> None:
        arrivals = self.load.arrivals
        while arrivals is not None and self.next < self.load.count and arrivals[self.next] <= self.now:
            self._send(float(arrivals[self.next]))

    def _prompts(self) -> list[tuple[_Sequence, int]]:
        """Prompts of the next step, with the number of their tokens that it computes."""
        engine, running = self.engine, len(self.ending)
        budget = engine.token_budget - (0 if engine.schedule == "prefill-first" else running)
        found: list[tuple[_Sequence, int]] = []
        while budget > 0:
            if self.filling and (not found or found[-1][0] is not self.filling[-1]):
                each = self.filling[-1]
            elif self.waiting and self._admits(running + len(found)):
                each = self.waiting.popleft()
                self.cached += each.prompt + each.left + 1
                self.filling.append(each)
            else:
                break
            left = each.prompt - each.done
            if engine.schedule == "whole-prompts" and left > budget and found:
                self.filling.pop()
                self.waiting.appendleft(each)
                self.cached -= each.prompt + each.left + 1
                break
            taken = left if engine.schedule == "whole-prompts" else min(left, budget)
            found.append((each, taken))
            budget -= taken
            if taken < left:
                break
            self.filling.pop()
        return found

    def _admits(self, running: int) -> bool:
        each = self.waiting[0]
        needed = each.prompt + each.left + 1
        return running < self.engine.sequences and (self.cached + needed <= self.room or running == 0)

    def _step(self, prompts: list[tuple[_Sequence, int]]) -> None:
        """One step with ``prompts``, beside the decoding sequences unless the engine runs prompts alone."""
        alone = self.engine.schedule == "prefill-first"
        running = 0 if alone else len(self.ending)
        context = self._context() if running else 0.0
        seconds = self.price.step_seconds(running, context, [Prompt(taken, each.done) for each, taken in prompts])
        self._advance(seconds)
        if self.ending:
            self.pause += seconds
        if running:
            self._tokens(1)
        for each, taken in prompts:
            each.done += taken
            if each.done == each.prompt:
                self._begin(each)
        self._finish()

    def _begin(self, each: _Sequence) -> None:
        """The prompt is computed: its first token is known."""
        self.run.first[each.number] = self.now
        if each.left:
            context = each.prompt + 1 - self.ticks
            heapq.heappush(self.ending, (self.ticks + each.left, each.number, context))
            self.contexts += context
        else:
            self._end(each.number)

    def _context(self) -> float:
        return self.contexts / len(self.ending) + self.ticks

    def _decode(self) -> None:
        """Decoding steps up to the next event."""
        running = len(self.ending)
        steps = self.ending[0][0] - self.ticks
        context = self._context()
        steps = min(steps, max(int(context * _GROWTH), 16))
        seconds = self.price.step_seconds(running, context + (steps - 1) / 2)
        arrivals = self.load.arrivals
        if arrivals is not None and self.next < self.load.count:
            until = float(arrivals[self.next]) - self.now
            steps = max(min(steps, int(until / seconds) + 1), 1)
        if self.pause:
            self.pause += seconds
            self._tokens(1)
            self._advance(seconds)
            steps -= 1
        if steps:
            self._advance(seconds * steps)
            self.pause = seconds
            self._tokens(steps)
        self._finish()

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.run.busy += seconds
        self.run.most_cached = max(self.run.most_cached, self.cached)

    def _tokens(self, steps: int) -> None:
        """Every decoding sequence got ``steps`` tokens, ``pause`` seconds apart."""
        self.run.gaps.append(self.pause)
        self.run.gap_tokens.append(steps * len(self.ending))
        self.run.steps += steps
        self.ticks += steps
        self.pause = 0.0

    def _finish(self) -> None:
        while self.ending and self.ending[0][0] <= self.ticks:
            _, number, context = heapq.heappop(self.ending)
            self.contexts -= context
            self._end(number)

    def _end(self, number: int) -> None:
        self.run.last[number] = self.now
        self.cached -= self.inputs[number] + self.outputs[number]
        self.ended += 1
        if self.load.arrivals is None and self.next < self.load.count:
            self._send(self.now)


def engine_room(engine: Engine, tokens: float) -> int:
    """Tokens that whole blocks of the cache hold."""
    return int(tokens // engine.block * engine.block)
