"""Clients, a router and replicas: who serves which request, and when it is sent."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from e2e.serving.schedule import Scheduler, ServedSequence
from e2e.serving.workload import Workload

_NEVER, _LOAD = math.inf, attrgetter("load")


@dataclass(frozen=True)
class Decoders:
    """Replicas that decode what others computed the prompts of; ``transfer``: seconds to send the cache of so many
    tokens.
    """

    replicas: Sequence[Scheduler]
    transfer: Callable[[int], float]


def serve_workload(
    load: Workload, replicas: Sequence[Scheduler], router: str = "round-robin", decoders: Decoders | None = None
) -> None:
    """Serve all requests of ``load``; the replicas write what clients see into their :class:`ServedRun`.

    ``router``: ``round-robin``, one after the other; ``least-loaded``, where the fewest requests are; ``prefix``, equal
    beginnings of prompts to the same replica.
    """
    numbers, count = np.arange(load.count), len(replicas)
    if decoders is not None or router == "least-loaded":
        _serve(load, numbers, load.concurrency, replicas, decoders)
        return
    places = numbers % count
    if router == "prefix" and load.prefixes is not None:
        places = np.array([(each[0] if each else number) % count for number, each in enumerate(load.prefixes)])
    if load.arrivals is None and load.concurrency < count:
        _serve(load, numbers, load.concurrency, replicas, places=places)
        return
    # These routers ask no replica for its state: each replica is served for itself, which is faster.
    for place, replica in enumerate(replicas):
        own = numbers[places == place]
        # Clients wait where their requests are served.
        clients = math.ceil(load.concurrency * len(own) / load.count - place / count)
        _serve(load, own, max(clients, 1), [replica])


def _serve(
    load: Workload, numbers: np.ndarray, concurrency: int, replicas: Sequence[Scheduler],
    decoders: Decoders | None = None, places: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Serve the requests ``numbers``, in time order: the earliest of all replicas makes the next step.

    ``places``: replica of each request; ``None``: the least loaded.
    """
    left, listed = len(numbers), iter(numbers.tolist())
    arrivals = None if load.arrivals is None else load.arrivals[numbers].tolist()
    # Heap of the times at which requests reach the engine, after the server's time; in a closed loop all start at once.
    server = replicas[0].engine.server
    sends = [server] * min(concurrency, left) if arrivals is None else [each + server for each in arrivals]
    waiting = left - len(sends)  # requests whose client has no answer to the one before
    handed: list[tuple[float, int]] = []  # heap of sequences that are sent to a decoder, and when they are there
    sent, inputs, outputs = replicas[0].run.sent, load.inputs.tolist(), load.outputs.tolist()
    decoding = decoders.replicas if decoders else ()
    every = [*replicas, *decoding]
    earliest, others = every[0], _NEVER
    while left:
        when = sends[0] if sends else _NEVER
        moved = handed[0][0] if handed else _NEVER
        if len(every) > 1:
            busy = sorted(each.now for each in every if each.load)
            earliest = min(every, key=lambda each: each.now if each.load else _NEVER)
            others = busy[1] if len(busy) > 1 else _NEVER
        if when <= earliest.seen or moved <= earliest.seen or not earliest.load:
            if when <= moved:
                number = next(listed)
                heapq.heappop(sends)
                sent[number] = when - server
                each = _sequence(load, number, inputs[number], 0 if decoders else outputs[number] - 1)
                chosen = min(replicas, key=_LOAD) if places is None else replicas[places[number]]
                chosen.submit(each, when)
            else:
                number = heapq.heappop(handed)[1]
                each = ServedSequence(number, inputs[number], outputs[number] - 1, done=inputs[number])
                min(decoding, key=_LOAD).submit(each, moved)
            continue
        earliest.step(min(when, moved, others))
        for number in earliest.ended:
            if decoders and earliest in replicas and outputs[number] > 1:
                heapq.heappush(handed, (earliest.now + decoders.transfer(inputs[number]), number))
                continue
            left -= 1
            if waiting:
                waiting -= 1
                heapq.heappush(sends, earliest.now + server)
        earliest.ended.clear()


def _sequence(load: Workload, number: int, prompt: int, left: int) -> ServedSequence:
    priority = 0 if load.priorities is None else int(load.priorities[number])
    prefix = () if load.prefixes is None else load.prefixes[number][: prompt // load.prefix_block]
    return ServedSequence(number, prompt, left, priority, prefix)
