"""Requests that clients send: lengths, and when they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from costmodel.base.errors import InputError


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent; arrays over the requests.

    ``arrivals``: seconds at which they arrive, or ``None`` for a closed loop: ``concurrency`` clients start at once,
    and each sends its next request when the one before is answered.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    arrivals: np.ndarray | None = None
    concurrency: int = 0
    # Lower ones are served first; ``None``: first come, first served.
    priorities: np.ndarray | None = None
    # Identities of the blocks of ``prefix_block`` tokens of each prompt; equal ones have equal tokens up to their ends.
    prefixes: Sequence[tuple[int, ...]] | None = None
    prefix_block: int = 0

    @property
    def count(self) -> int:
        """Number of requests."""
        return len(self.inputs)

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return int((self.inputs + self.outputs).max())


def drawn_lengths(mean: int, shortest: float, count: int, seed: int) -> np.ndarray:
    """``count`` whole lengths, even between ``shortest`` x ``mean`` and ``mean``, in a fixed shuffled order."""
    if shortest >= 1:
        return np.full(count, mean)
    places = (np.random.default_rng(seed).permutation(count) + 0.5) / count
    return np.maximum(np.round(mean * (shortest + (1 - shortest) * places)), 1).astype(int)


def closed_loop(
    input_length: int, output_length: int, concurrency: int, requests: int, shortest: float = 1.0
) -> Workload:
    """Clients in lockstep that each send a request after the answer to the one before."""
    return Workload(
        drawn_lengths(input_length, shortest, requests, 1),
        drawn_lengths(output_length, shortest, requests, 2),
        concurrency=min(concurrency, requests),
    )


def open_loop(input_length: int, output_length: int, rate: float, requests: int, shortest: float = 1.0) -> Workload:
    """Requests that arrive at random, ``rate`` a second on average."""
    if rate <= 0:
        raise InputError(f"--rate {rate}: must be above zero")
    gaps = np.random.default_rng(3).exponential(1 / rate, requests)
    return Workload(
        drawn_lengths(input_length, shortest, requests, 1),
        drawn_lengths(output_length, shortest, requests, 2),
        np.cumsum(gaps) - gaps[0],
    )


def with_prefixes(load: Workload, length: int, share: float, groups: int) -> Workload:
    """``load`` in which a ``share`` of the prompts begin with one of ``groups`` texts of ``length`` tokens."""
    if not 0 < length < int(load.inputs.min()):
        raise InputError(
            f"--prefix-length {length}: must be above 0 and below the shortest prompt, {load.inputs.min()}"
        )
    drawn = np.random.default_rng(4)
    chosen = np.where(drawn.random(load.count) < share, drawn.integers(0, groups, load.count), -1).tolist()
    ends = np.cumsum(load.inputs // length).tolist()
    # Identities below zero are of one prompt alone.
    own = [range(-end, -end + tokens // length) for end, tokens in zip(ends, load.inputs.tolist(), strict=True)]
    prefixes = [tuple(each) if group < 0 else (group, *each[1:]) for group, each in zip(chosen, own, strict=True)]
    return replace(load, prefixes=prefixes, prefix_block=length)
