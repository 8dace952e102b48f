"""Continuous batching on a toy engine: every step takes a second, and the cache holds few tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest

from e2e.serving.engines import Engine, engine_named
from e2e.serving.prefix_cache import PrefixCache
from e2e.serving.replicas import Decoders, serve_workload
from e2e.serving.schedule import Scheduler, ServedRun
from e2e.serving.step_price import StepPrice
from e2e.serving.workload import Workload, closed_loop, with_prefixes


@dataclass
class _ToyPrice:
    """One second a step, and 0.01 s for every token of a prompt."""

    engine: Engine
    tokens_per_step: float = 1.0
    copies: int = 1
    sequence_tokens: int = 0

    def step_seconds(self, sequences: int, context: float, prompts: tuple = ()) -> float:
        return 1.0 + 0.01 * sum(each.queries for each in prompts)


def _served(
    load: Workload,
    room: int = 10_000,
    engine: str = "vllm",
    replicas: int = 1,
    router: str = "round-robin",
    **changes: object,
) -> ServedRun:
    run = ServedRun.of(load.count)
    prefixes = [PrefixCache(load.prefix_block) if load.prefixes else None for _ in range(replicas)]
    made = [_scheduler(run, room, engine, each, **changes) for each in prefixes]
    serve_workload(load, made, router)  # type: ignore[arg-type]
    return run


def _scheduler(
    run: ServedRun, room: int, engine: str = "vllm", prefixes: PrefixCache | None = None, **changes: object
) -> Scheduler:
    price = _ToyPrice(replace(engine_named(engine), **{"server": 0.0, **changes}))  # type: ignore[arg-type]
    return Scheduler(cast("StepPrice", price), room, run, prefixes)


def test_one_request_takes_its_prompt_and_its_tokens() -> None:
    run = _served(closed_loop(100, 11, 1, 1))
    assert run.first[0] == pytest.approx(2.0)
    assert run.last[0] == pytest.approx(12.0)
    assert run.steps == 10


def test_a_client_sends_again_when_the_answer_is_there_and_the_server_takes_its_time() -> None:
    run = _served(closed_loop(100, 11, 1, 2), server=0.5)
    # 0.5 s server, 2 s prompt, 10 tokens, then the same again.
    assert run.sent.tolist() == [0.0, 12.5]
    assert run.first.tolist() == [2.5, 15.0]
    assert run.last.tolist() == [12.5, 25.0]


@pytest.mark.parametrize(("overlaps", "first"), [(False, 6.0), (True, 7.0)])
def test_who_arrives_in_a_step_waits_for_the_next_one_too_if_that_is_planned(overlaps: bool, first: float) -> None:
    """The first request has its prompt until 2 s and then a token each second; the second one comes at 3.5 s."""
    load = replace(closed_loop(100, 11, 2, 2), arrivals=np.array([0.0, 3.5]))
    run = _served(load, overlaps=overlaps)
    assert run.first.tolist() == [2.0, first]


def test_one_slot_of_so_many_as_users_stays_empty() -> None:
    assert engine_named("trtllm=1.0", users=8).sequences == 8
    run = _served(closed_loop(100, 11, 2, 2), sequences=2, idle_slots=1)
    assert run.first[1] == run.last[0] + 2.0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_all_tokens_come_whatever_the_room(engine: str) -> None:
    load = closed_loop(100, 50, 8, 24, 0.5)
    run = _served(load, 500, engine)
    assert run.most_cached <= 500
    assert (run.last >= run.first).all()
    produced = sum(run.gap_tokens) + load.count + run.preempted
    # A sequence that is computed again gets its next token with its prompt.
    assert produced >= load.outputs.sum()
    assert (run.preempted > 0) == (engine == "vllm")


def test_no_eviction_waits_for_room_for_the_whole_request() -> None:
    load = closed_loop(100, 50, 2, 2)
    assert _served(load, 299, "trtllm").first[1] > _served(load, 299, "trtllm").last[0] - 1e-9
    assert _served(load, 300, "trtllm").first[1] == _served(load, 300, "trtllm").first[0]


def test_a_sequence_takes_room_for_its_state() -> None:
    run = ServedRun.of(2)
    price = _ToyPrice(replace(engine_named("trtllm"), server=0.0), sequence_tokens=20)
    serve_workload(closed_loop(100, 50, 2, 2), [Scheduler(cast("StepPrice", price), 339, run)])
    assert run.first[1] > run.last[0]
    assert run.most_cached == 100 + 50 + 20 - 1  # before its last token


def test_the_latest_sequence_is_preempted_and_computed_again() -> None:
    run = _served(closed_loop(100, 50, 2, 2), 220)
    assert run.preempted == 1
    assert run.prompt_tokens == 100 + 100 + 110  # it had ten tokens when the cache was full
    assert run.last[1] > run.last[0]
    assert run.first[1] == run.first[0]


@pytest.mark.parametrize(("engine", "prompts"), [("vllm", 2), ("sglang", 1)])
def test_copies_of_the_attention_have_a_budget_each_or_share_one(engine: str, prompts: int) -> None:
    """Two prompts of 100 tokens, budget 100: both in the first step where each of two copies has the budget."""
    run, changed = ServedRun.of(2), replace(engine_named(engine), token_budget=100)
    made = Scheduler(cast("StepPrice", _ToyPrice(changed, copies=2)), 10_000, run)
    serve_workload(closed_loop(100, 3, 2, 2), [made], "round-robin")
    assert sum(run.first == run.first.min()) == prompts


def test_an_urgent_request_is_served_first() -> None:
    load = replace(closed_loop(100, 50, 3, 3), priorities=np.array([1, 1, 0]))
    run = _served(load, 220)
    assert run.last[2] < run.last[0] <= run.last[1]


def test_equal_beginnings_are_computed_once() -> None:
    plain = closed_loop(100, 5, 1, 4)
    shared = with_prefixes(plain, 50, 1.0, 1)
    run = _served(shared)
    assert run.prefix_hits == 3 * 50
    assert run.first[1] - run.sent[1] == pytest.approx(1.5)
    assert _served(with_prefixes(plain, 50, 0.0, 1)).prefix_hits == 0


def test_a_block_that_nobody_holds_is_evicted_when_its_room_is_needed() -> None:
    load = with_prefixes(closed_loop(100, 5, 1, 40), 50, 1.0, 10)
    assert _served(load, 110).prefix_hits <= _served(load, 160).prefix_hits < _served(load, 10_000).prefix_hits


def test_prefix_blocks_are_evicted_from_the_end_least_recently_used_first() -> None:
    cache = PrefixCache(10)
    cache.hold((1, 2))
    cache.hold((1, 3))
    assert cache.held((1, 2, 4)) == 20
    assert cache.held_tokens == 30
    cache.release((1, 2))
    cache.release((1, 3))
    cache.shrink(20)  # 2 goes
    assert cache.hold((1, 2)) == (10, 20)
    assert cache.hold((1, 3)) == (20, 20)


def test_two_replicas_serve_twice_the_requests() -> None:
    load = closed_loop(100, 50, 8, 40)
    one, two = _served(load, sequences=4), _served(load, replicas=2, sequences=4)
    assert two.last.max() == pytest.approx(one.last.max() / 2, rel=0.1)
    assert two.busy == pytest.approx(one.busy, rel=0.1)


def test_the_least_loaded_replica_gets_the_next_request() -> None:
    # Every other request is long: a round keeps them all on one replica.
    outputs = np.array([200, 2] * 10)
    load = Workload(np.full(20, 10), outputs, np.arange(20) * 20.0)
    turns = _served(load, replicas=2, sequences=1)
    chosen = _served(load, replicas=2, router="least-loaded", sequences=1)
    assert (chosen.first - chosen.sent).mean() < (turns.first - turns.sent).mean()


def test_a_router_by_prefix_keeps_equal_beginnings_together() -> None:
    load = with_prefixes(closed_loop(100, 5, 2, 40), 50, 1.0, 8)
    together = _served(load, replicas=4, router="prefix").prefix_hits
    assert together == (40 - 8) * 50 > _served(load, replicas=4).prefix_hits


def test_decoding_apart_waits_for_the_cache_and_has_no_pauses() -> None:
    load = closed_loop(100, 11, 4, 8)
    run = ServedRun.of(load.count)
    prompts, decoding = _scheduler(run, 10_000), _scheduler(run, 10_000)
    serve_workload(load, [prompts], decoders=Decoders([decoding], lambda tokens: tokens / 100))
    assert run.first[0] == pytest.approx(5.0 + 1.0)  # four prompts in one step, then the transfer
    assert run.last[0] - run.first[0] == pytest.approx(10.0)
    assert set(run.gaps) == {1.0}


def test_expected_tokens_of_speculation_shorten_the_run() -> None:
    load = closed_loop(100, 41, 2, 2)
    run = ServedRun.of(2)
    price = _ToyPrice(engine_named("vllm"), tokens_per_step=2.5)
    serve_workload(load, [Scheduler(cast("StepPrice", price), 10_000, run)])
    assert run.last[0] - run.first[0] == pytest.approx(40 / 2.5)


def test_all_clients_wait_where_all_requests_go() -> None:
    load = with_prefixes(closed_loop(100, 5, 8, 40), 50, 1.0, 1)
    one, four = _served(load), _served(load, replicas=4, router="prefix")
    assert four.last.max() == one.last.max()
    assert sum(each > 0 for each in four.busy_seconds) == 1


def test_one_client_gets_no_more_from_two_replicas() -> None:
    load = closed_loop(100, 5, 1, 4)
    assert _served(load, replicas=2).last.max() == pytest.approx(_served(load).last.max())


@pytest.mark.parametrize(("copies", "at_once"), [(1, 2), (2, 4)])
def test_copies_of_the_attention_have_a_limit_of_sequences_each(copies: int, at_once: int) -> None:
    run, changed = ServedRun.of(4), replace(engine_named("vllm"), sequences=2)
    made = Scheduler(cast("StepPrice", _ToyPrice(changed, copies=copies)), 10_000, run)
    serve_workload(closed_loop(100, 3, 4, 4), [made])
    assert sum(run.first < run.last.min()) == at_once
