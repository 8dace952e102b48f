"""Requests that clients send: lengths, and when they are sent; drawn, or recorded by Azure, BurstGPT and Mooncake."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError

from costmodel.base.errors import InputError
from costmodel.base.input_files import read_text
from costmodel.machines.record_file import explain_problems
from e2e.serving.serving_request import MOST_REQUESTS, ServingRequest


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
    unanswered: int = 0  # requests of a trace that are left out

    @property
    def count(self) -> int:
        """Number of requests."""
        return len(self.inputs)

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return int((self.inputs + self.outputs).max())


def workload_of(request: ServingRequest) -> Workload:
    """The requests that clients send."""
    if request.trace is not None:
        load = read_trace(request.trace, request.concurrency, request.duration)
    else:
        load = closed_loop(
            request.input_length,
            request.output_length,
            request.concurrency or 1,
            request.count,
            request.shortest_length,
        )
    if request.rate is not None:  # in place of users
        # As vLLM's benchmark does: scaled, so that they arrive in the time that the rate says.
        ends = np.cumsum(np.random.default_rng(3).exponential(1.0, load.count))
        load = replace(load, arrivals=(ends - ends[0]) / ends[-1] * load.count / request.rate, concurrency=0)
    if request.prefix_length:
        return with_prefixes(load, request.prefix_length, request.prefix_share, request.prefix_groups)
    return load


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


# --- recorded requests -----------------------------------------------------------------------------

MOONCAKE_BLOCK = 512
_Tokens = Annotated[int, Field(ge=0, le=10_000_000)]


def _instant(text: str) -> float:
    moment = datetime.fromisoformat(str(text).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


class _Azure(BaseModel):
    """Row of Azure's LLM inference traces (2023, 2024), CSV."""

    seconds: Annotated[float, BeforeValidator(_instant)] = Field(alias="TIMESTAMP")
    prompt: _Tokens = Field(alias="ContextTokens")
    output: _Tokens = Field(alias="GeneratedTokens")


class _BurstGpt(BaseModel):
    """Row of BurstGPT, CSV; responses of 0 tokens failed."""

    seconds: FiniteFloat = Field(alias="Timestamp")
    prompt: _Tokens = Field(alias="Request tokens")
    output: _Tokens = Field(alias="Response tokens")


class _Mooncake(BaseModel):
    """Line of Mooncake's traces, JSON; ``prefix``: one identity per block of 512 tokens, equal for equal prefixes."""

    seconds: Annotated[FiniteFloat, AfterValidator(lambda milliseconds: milliseconds / 1e3)] = Field(alias="timestamp")
    prompt: _Tokens = Field(alias="input_length")
    output: _Tokens = Field(alias="output_length")
    prefix: tuple[int, ...] | None = Field(None, alias="hash_ids")
    priority: int = 0


# Seconds, tokens of prompt and output, prefix, priority.
_Row = tuple[float, int, int, tuple[int, ...], int]


def read_trace(path: Path, concurrency: int | None = None, duration: float | None = None) -> Workload:
    """The requests of ``path`` in the order of their arrivals, the first at 0 s, those up to ``duration`` seconds;
    requests without an answer are left out.

    With ``concurrency`` its arrivals do not count: so many clients send the requests in this order, each after the
    answer to the one before. Raises ``InputError`` naming file and line for anything but a trace.
    """
    try:
        lines = read_text(path, "trace").lstrip("\ufeff").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: is no text ({error}); give a trace as .csv or .jsonl") from None
    rows = list(islice(_rows(path, lines), MOST_REQUESTS + 1))
    if len(rows) > MOST_REQUESTS:
        raise InputError(f"{path}: at most {MOST_REQUESTS:,} requests are taken; give a part of the trace")
    unanswered = sum(not row[2] for row in rows)
    rows = sorted((row for row in rows if row[2]), key=lambda row: row[0])
    if duration is not None:
        rows = [row for row in rows if row[0] - rows[0][0] <= duration]
    if not rows:
        raise InputError(f"{path}: has no request that was answered; give a trace with rows")
    seconds, prompts, outputs, prefixes, priorities = zip(*rows, strict=True)
    return Workload(
        np.maximum(prompts, 1),
        np.array(outputs),
        np.array(seconds) - seconds[0] if concurrency is None else None,
        min(concurrency or 0, len(rows)),
        priorities=np.array(priorities) if any(priorities) else None,
        prefixes=prefixes if any(prefixes) else None,
        prefix_block=MOONCAKE_BLOCK if any(prefixes) else 0,
        unanswered=unanswered,
    )


def _rows(path: Path, lines: Sequence[str]) -> Iterator[_Row]:
    number = 0
    try:
        if next((each for each in lines if each.strip()), "").lstrip().startswith("{"):
            for line in lines:
                number += 1
                if line.strip():
                    each = _Mooncake.model_validate_json(line)
                    yield each.seconds, each.prompt, each.output, each.prefix or (), each.priority
            return
        table, kind = _table(path, lines)
        for record in table:
            number = table.line_num
            row = kind.model_validate(record)
            yield row.seconds, row.prompt, row.output, (), 0
    except ValidationError as error:
        raise InputError(f"{path}, line {number}: {explain_problems(error)}") from None
    except csv.Error as error:
        raise InputError(f"{path}: is no CSV after line {number} ({error}); correct it") from None


def _table(path: Path, lines: Iterable[str]) -> tuple[csv.DictReader[str], type[_Azure | _BurstGpt]]:
    table = csv.DictReader(lines)
    columns = table.fieldnames = [each.strip() for each in table.fieldnames or ()]
    named = {kind: [str(each.alias) for each in kind.model_fields.values()] for kind in (_Azure, _BurstGpt)}
    found = next((kind for kind, names in named.items() if {*names} <= {*columns}), None)
    if found is None:
        raise InputError(
            f"{path}, line 1: has the columns {', '.join(columns) or 'none'}; give those of Azure or BurstGPT "
            f"({'; '.join(', '.join(names) for names in named.values())}), or JSON per line as Mooncake's"
        )
    return table, found
