"""Requests that clients send: lengths, and when they are sent; drawn, or recorded by Azure, BurstGPT and Mooncake."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError

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
        lengths = request.input_length, request.output_length
        load = closed_loop(*lengths, request.concurrency or 1, request.count, request.shortest_length)
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
# Names of the moment, of the tokens of prompt and output.
_MOONCAKE = ("timestamp", "input_length", "output_length")
_TABLES = (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), ("Timestamp", "Request tokens", "Response tokens"))
_MOMENT, _PROMPT, _OUTPUT = (AliasChoices(*names) for names in zip(_MOONCAKE, *_TABLES, strict=True))


def _seconds(moment: object) -> object:
    """Seconds of a number, or of a date and time."""
    if not isinstance(moment, str):
        return moment
    try:
        return float(moment)
    except ValueError:
        found = datetime.fromisoformat(moment.strip())
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


class _Request(BaseModel):
    """A row of Azure's LLM inference traces (2023, 2024) or of BurstGPT, or a line of Mooncake's (JSON, milliseconds).

    ``prefix``: one identity per block of 512 tokens, equal for equal prefixes; outputs of 0 tokens failed.
    """

    seconds: Annotated[FiniteFloat, BeforeValidator(_seconds)] = Field(validation_alias=_MOMENT)
    prompt: _Tokens = Field(validation_alias=_PROMPT)
    output: _Tokens = Field(validation_alias=_OUTPUT)
    prefix: tuple[int, ...] | None = Field(None, validation_alias="hash_ids")
    priority: int = 0


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
    asked = list(islice(_requests(path, lines), MOST_REQUESTS + 1))
    if len(asked) > MOST_REQUESTS:
        raise InputError(f"{path}: at most {MOST_REQUESTS:,} requests are taken; give a part of the trace")
    rows = sorted((each for each in asked if each.output), key=lambda each: each.seconds)
    unanswered = len(asked) - len(rows)
    if duration is not None:
        rows = [each for each in rows if each.seconds - rows[0].seconds <= duration]
    if not rows:
        raise InputError(f"{path}: has no request that was answered; give a trace with rows")
    seconds, priorities = np.array([each.seconds for each in rows]), np.array([each.priority for each in rows])
    prefixes = [each.prefix or () for each in rows]
    return Workload(
        np.array([max(each.prompt, 1) for each in rows]),
        np.array([each.output for each in rows]),
        seconds - seconds[0] if concurrency is None else None,
        min(concurrency or 0, len(rows)),
        priorities=priorities if priorities.any() else None,
        prefixes=prefixes if any(prefixes) else None,
        prefix_block=MOONCAKE_BLOCK if any(prefixes) else 0,
        unanswered=unanswered,
    )


def _requests(path: Path, lines: Sequence[str]) -> Iterator[_Request]:
    number = 0
    try:
        if next((each for each in lines if each.strip()), "").lstrip().startswith("{"):
            for line in lines:
                number += 1
                if line.strip():
                    found = _Request.model_validate_json(line)
                    found.seconds /= 1e3
                    yield found
            return
        table = csv.DictReader(lines)
        columns = table.fieldnames = [each.strip() for each in table.fieldnames or ()]
        if not any({*names} <= {*columns} for names in _TABLES):
            raise InputError(
                f"{path}, line 1: has the columns {', '.join(columns) or 'none'}; give those of Azure or BurstGPT "
                f"({'; '.join(', '.join(names) for names in _TABLES)}), or JSON per line as Mooncake's"
            )
        for record in table:
            number = table.line_num
            yield _Request.model_validate(record)
    except ValidationError as error:
        raise InputError(f"{path}, line {number}: {explain_problems(error)}") from None
    except csv.Error as error:
        raise InputError(f"{path}: is no CSV after line {number} ({error}); correct it") from None
