"""The scheduler of an engine: which prompts and sequences each step computes, and which the cache has room for.

Steps in which nothing changes are taken together: between two events (a sequence ends, a request arrives, the cache is
full) only the contexts grow, so their seconds are those of the middle one.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from e2e.serving.prefix_cache import PrefixCache
from e2e.serving.step_price import Prompt, StepPrice

# Contexts grow by this share at most in steps that are taken together.
_GROWTH = 0.1
# SGLang reserves for a running sequence this share of the outputs that it may still produce; the share falls in so many
# decoding steps to the smallest, and a retracted sequence sets it anew, with so many tokens of reserve (defaults of
# SGLANG_INIT_NEW_TOKEN_RATIO, _MIN_NEW_TOKEN_RATIO_FACTOR, _NEW_TOKEN_RATIO_DECAY_STEPS, _RETRACT_DECODE_STEPS and
# _CLIP_MAX_NEW_TOKENS_ESTIMATION in python/sglang/srt/environ.py).
_RESERVED, _LEAST_RESERVED, _FALLING_STEPS, _RETRACT_STEPS, _CLIP = 0.7, 0.7 * 0.14, 600, 20, 4096


# Steps that a run keeps for its timeline.
MOST_LOGGED = 2000


class LoggedStep(NamedTuple):
    """``repeats`` equal steps of ``seconds`` from ``start`` on: ``sequences`` after ``context`` tokens, ``prompts``."""

    start: float
    seconds: float
    repeats: int
    sequences: int
    context: float
    prompts: tuple[Prompt, ...]
    replica: int


@dataclass
class ServedRun:
    """What clients saw: arrays over the requests, in seconds since the start."""

    sent: np.ndarray
    first: np.ndarray
    last: np.ndarray
    # Seconds between tokens of one sequence, and how many tokens came after that time.
    gaps: list[float] = field(default_factory=list)
    gap_tokens: list[float] = field(default_factory=list)
    # Seconds in which each replica computed; the most tokens that one replica's cache held, and
    # tokens held x seconds.
    busy_seconds: list[float] = field(default_factory=list)
    most_cached: float = 0.0
    cached_seconds: float = 0.0
    preempted: int = 0
    steps: int = 0
    # Tokens of prompts, and those of them that were in the prefix cache.
    prompt_tokens: int = 0
    prefix_hits: int = 0
    # The first steps of all replicas.
    log: list[LoggedStep] = field(default_factory=list)

    @property
    def busy(self) -> float:
        """Seconds in which replicas computed, added up."""
        return sum(self.busy_seconds)

    @classmethod
    def of(cls, count: int) -> ServedRun:
        """A run of ``count`` requests, nothing served yet."""
        return cls(np.zeros(count), np.zeros(count), np.zeros(count))


@dataclass(slots=True)
class ServedSequence:
    """One request on its way through a replica."""

    number: int
    prompt: int  # tokens to compute before the next output
    left: int  # outputs after that one
    priority: int = 0
    # Identities of the blocks of the prompt, and the tokens of each.
    prefix: tuple[int, ...] = ()
    done: int = 0  # tokens of the prompt that are in the cache
    produced: int = 0  # outputs so far
    start: float = 0.0  # context at tick 0, once it decodes
    end: int = 0  # tick of its last output
    shared: int = 0  # tokens that lie in blocks of the prefix cache
    since: float = 0.0  # time of its last output, once it was preempted

    @property
    def order(self) -> tuple[int, int]:
        """Place in the queue: by priority, then first come, first served."""
        return self.priority, self.number


class Scheduler:
    """Continuous batching on one replica of an engine: the state between two steps."""

    def __init__(self, price: StepPrice, room: int, run: ServedRun, prefixes: PrefixCache | None = None) -> None:
        self.price, self.engine, self.room, self.run, self.prefixes = price, price.engine, room, run, prefixes
        self.copies = price.copies  # of the attention, with a budget and sequences each
        self.number = len(run.busy_seconds)
        run.busy_seconds.append(0.0)
        self.yielded = price.tokens_per_step  # outputs of a sequence in one decoding step
        self.beside = price.sequence_tokens  # tokens of the cache that a sequence takes beside its own
        self.now = 0.0
        self.seen = 0.0  # requests that arrived by then may join the next step
        self.ticks = 0  # decoding steps so far
        self.waiting: list[tuple[tuple[int, int], ServedSequence]] = []
        self.filling: deque[ServedSequence] = deque()  # prompts that are partly computed
        self.running: dict[int, ServedSequence] = {}  # decoding sequences
        self.ending: list[tuple[int, int, int, ServedSequence]] = []  # by last tick; those preempted are still there
        self.contexts = 0.0  # sum of the contexts of decoding sequences, at tick 0
        self.ends = 0  # sum of their last ticks
        self.filled = 0  # tokens of admitted prompts that do not decode yet
        self.coming = 0  # outputs that they will produce
        self.shared = 0  # tokens of all admitted sequences in blocks of the prefix cache
        self.promised = 0  # tokens of all admitted sequences at their ends
        self.reserved = _RESERVED
        self.full = False  # a sequence was preempted for this step: nothing is admitted
        self.admitted = 0  # sequences whose prompts are computed or that decode
        self.pause = 0.0  # seconds since the last token of the decoding sequences
        self.begun = Counter[float]()  # sequences that began to decode in it, by how long it was then
        self.ended: list[int] = []  # requests answered since they were last taken away

    @property
    def load(self) -> int:
        """Number of sequences waiting or admitted."""
        return len(self.waiting) + self.admitted

    def submit(self, each: ServedSequence, when: float) -> None:
        """Queue a sequence at ``when`` seconds."""
        if not self.load:
            self.now = self.seen = max(self.now, when)
            self.reserved = _RESERVED
        heapq.heappush(self.waiting, (each.order, each))

    def step(self, until: float) -> None:
        """Compute the next step, or several equal ones of which the last begins before ``until``."""
        self._make_room()
        prompts = self._prompts()
        if prompts:
            self._step(prompts)
        elif self.running:
            self._decode(until)

    def cached(self) -> float:
        """Tokens that the admitted sequences hold in the cache."""
        found = self.filled + self.contexts + self.ticks * self.yielded * len(self.running)
        found += self.beside * self.admitted
        return found if self.prefixes is None else found - self.shared + self.prefixes.held_tokens

    def _prompts(self) -> list[tuple[ServedSequence, int]]:
        """Prompts of the next step, with the number of their tokens that it computes."""
        engine = self.engine
        whole = engine.schedule == "whole-prompts"
        budget = engine.token_budget * (1 if engine.shares_budget else self.copies)
        budget -= 0 if engine.schedule == "prefill-first" else len(self.running)
        found: list[tuple[ServedSequence, int]] = []
        while budget > 0:
            if self.filling and (not found or found[-1][0] is not self.filling[-1]):
                each = self.filling[-1]
            elif self.waiting and self._admits(len(found)):
                each = self.waiting[0][1]
                if whole and found and each.prompt - each.done > budget:
                    break
                heapq.heappop(self.waiting)
                self._admit(each)
                if each.done == each.prompt:  # computed by a replica for prompts
                    self._begin(each)
                    continue
                self.filling.append(each)
            else:
                break
            left = each.prompt - each.done
            taken = left if whole else min(left, budget)
            found.append((each, taken))
            budget -= taken
            if taken < left:
                break
            self.filling.pop()
        return found

    def _admits(self, prompts: int) -> bool:
        """Whether the first waiting sequence may start: as each engine decides it.

        ``no-evict`` (TensorRT-LLM, GUARANTEED_NO_EVICT): all sequences can reach their ends; ``estimate`` (SGLang,
        PrefillAdder): its own end, and the reserved share of what the running ones may still produce; ``prompt`` (vLLM,
        allocate_slots; TensorRT-LLM, MAX_UTILIZATION): its prompt.
        """
        active = len(self.running) + prompts
        if not active:
            return True
        each, room, policy = self.waiting[0][1], self.room, self.engine.admission
        if active >= (self.engine.sequences - self.engine.idle_slots) * self.copies or self.full:
            return False
        if policy == "no-evict":
            return self.promised + self._whole(each) <= room
        needed = self.cached() + each.prompt + self.beside
        if self.prefixes is not None:
            needed -= self.prefixes.held(each.prefix)
        if policy == "estimate":
            running = (self.ends - self.ticks * len(self.running)) * self.yielded
            needed += min(each.left + 1, _CLIP) + self.coming + self.reserved * running
        return needed <= room

    def _whole(self, each: ServedSequence) -> int:
        """Tokens that ``each`` holds at its end."""
        return each.prompt + each.left + 1 + self.beside

    def _admit(self, each: ServedSequence) -> None:
        if self.prefixes is not None and each.prefix:
            self.prefixes.shrink(self.room - self.cached())
            hits, each.shared = self.prefixes.hold(each.prefix)
            each.done = min(hits, each.prompt - 1)
            self.shared += each.shared
            self.run.prefix_hits += each.done
        self.admitted += 1
        self.promised += self._whole(each)
        self.filled += each.prompt
        self.coming += min(each.left + 1, _CLIP)
        self.run.prompt_tokens += each.prompt

    def _make_room(self) -> None:
        """Preempt sequences until the others have room for their next tokens; they are computed again later.

        vLLM and TensorRT-LLM take the latest of the lowest priority, SGLang the one with the fewest outputs.
        """
        self.full = False
        if self.engine.admission == "no-evict":
            return
        while self.running and self.cached() + self.yielded * len(self.running) > self.room:
            candidates = [*self.running.values(), *self.filling]
            if len(candidates) == 1:
                return
            if self.engine.admission == "estimate":
                each = min(candidates, key=lambda one: (-one.priority, one.produced + self._decoded(one), -one.prompt))
            else:
                each = max(candidates, key=lambda one: one.order)
            self._preempt(each)
            if self.engine.admission == "estimate":
                made = sum(one.produced + self._decoded(one) for one in self.running.values())
                most = made + (self.ends - self.ticks * len(self.running)) * self.yielded
                self.reserved = min((made + _RETRACT_STEPS * len(self.running)) / (most + 1), 1.0)

    def _decoded(self, each: ServedSequence) -> int:
        """Outputs of ``each`` after the one with which it began to decode."""
        return round(each.start + self.ticks * self.yielded) - each.prompt - 1 if each.number in self.running else 0

    def _preempt(self, each: ServedSequence) -> None:
        self.full = True
        self.run.preempted += 1
        self._leave(each)
        if each.number in self.running:
            decoded = min(self._decoded(each), each.left - 1)
            del self.running[each.number]
            self.contexts -= each.start
            self.ends -= each.end
            each.prompt, each.left = each.prompt + decoded + 1, each.left - decoded - 1
            each.produced += decoded
            each.since = self.now - self.pause
        else:
            self.filling.remove(each)
            self.filled -= each.prompt
            self.coming -= min(each.left + 1, _CLIP)
        each.done = 0
        heapq.heappush(self.waiting, (each.order, each))

    def _leave(self, each: ServedSequence) -> None:
        """Free what ``each`` holds in the cache."""
        self.admitted -= 1
        self.promised -= self._whole(each)
        if self.prefixes is not None:
            self.prefixes.release(each.prefix)
            self.shared -= each.shared

    def _step(self, prompts: list[tuple[ServedSequence, int]]) -> None:
        """One step with ``prompts``, beside the decoding sequences unless the engine runs prompts alone."""
        running = 0 if self.engine.schedule == "prefill-first" else len(self.running)
        context = self._context() if running else 0.0
        asked = [Prompt(taken, each.done) for each, taken in prompts]
        seconds = self.price.step_seconds(running, context, asked)
        if len(self.run.log) < MOST_LOGGED:
            self.run.log.append(LoggedStep(self.now, seconds, 1, running, context, tuple(asked), self.number))
        self._advance(seconds)
        self._see(seconds)
        if self.running:
            self.pause += seconds
        if running:
            self._tokens(1)
        for each, taken in prompts:
            each.done += taken
            if each.done == each.prompt:
                self._begin(each)
        self._finish()

    def _begin(self, each: ServedSequence) -> None:
        """The prompt is computed: its next token is known."""
        self.filled -= each.prompt
        self.coming -= min(each.left + 1, _CLIP)
        if not each.produced:
            self.run.first[each.number] = self.now
        else:
            self.run.gaps.append(self.now - each.since)
            self.run.gap_tokens.append(1)
        each.produced += 1
        if each.left:
            if self.pause:
                self.begun[self.pause] += 1
            each.start = each.prompt + 1 - self.ticks * self.yielded
            each.end = self.ticks + (each.left if self.yielded == 1 else int(-(-each.left // self.yielded)))
            heapq.heappush(self.ending, (each.end, each.number, each.produced, each))
            self.running[each.number] = each
            self.contexts += each.start
            self.ends += each.end
        else:
            self._end(each)

    def _context(self) -> float:
        return self.contexts / len(self.running) + self.ticks * self.yielded

    def _decode(self, until: float) -> None:
        """Decoding steps up to the next event."""
        running = len(self.running)
        context = self._context()
        steps = min(self.ending[0][0] - self.ticks, max(int(context * _GROWTH), 16))
        if self.engine.admission != "no-evict":
            steps = max(min(steps, int((self.room - self.cached()) / (running * self.yielded))), 1)
            if self.waiting and self.engine.admission == "estimate":
                steps = min(steps, 16)
        seconds = self.price.step_seconds(running, context + (steps - 1) * self.yielded / 2)
        if self.now + steps * seconds > until:
            steps = max(min(steps, int((until - self.now) / seconds) + 1), 1)
        if len(self.run.log) < MOST_LOGGED:
            self.run.log.append(LoggedStep(self.now, seconds, steps, running, context, (), self.number))
        if self.pause:
            self.pause += seconds
            self._tokens(1)
            self._advance(seconds)
            steps -= 1
        if steps:
            self._advance(seconds * steps)
            self.pause = seconds
            self._tokens(steps)
        self._see(seconds)
        self._finish()

    def _see(self, seconds: float) -> None:
        """The step after this one of ``seconds`` was planned when it began, if the engine overlaps the two."""
        self.seen = self.now - seconds if self.engine.overlaps else self.now

    def _advance(self, seconds: float) -> None:
        run, cached = self.run, self.cached()
        self.now += seconds
        run.busy_seconds[self.number] += seconds
        run.cached_seconds += cached * seconds
        if cached > run.most_cached:
            run.most_cached = cached

    def _tokens(self, steps: int) -> None:
        """Every decoding sequence got the tokens of ``steps``, ``pause`` seconds apart; who began in it waited less."""
        tokens = steps * len(self.running)
        if self.begun:
            tokens = max(tokens - self.begun.total(), 0)
            self.run.gaps += [(self.pause - each) / self.yielded for each in self.begun]
            self.run.gap_tokens += [self.yielded * count for count in self.begun.values()]
            self.begun.clear()
        self.run.gaps.append(self.pause / self.yielded)
        self.run.gap_tokens.append(tokens * self.yielded)
        self.run.steps += steps
        self.ticks += steps
        self.reserved = max(self.reserved - (_RESERVED - _LEAST_RESERVED) / _FALLING_STEPS * steps, _LEAST_RESERVED)
        self.pause = 0.0

    def _finish(self) -> None:
        """End the sequences whose last output is known."""
        while self.ending:
            tick, number, _, each = self.ending[0]
            preempted = self.running.get(number) is not each or each.end != tick
            if tick > self.ticks and not preempted:
                return
            heapq.heappop(self.ending)
            if not preempted:
                del self.running[number]
                self.contexts -= each.start
                self.ends -= each.end
                self._end(each)

    def _end(self, each: ServedSequence) -> None:
        self.run.last[each.number] = self.now
        self._leave(each)
        self.ended.append(each.number)
