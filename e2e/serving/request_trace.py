"""Recorded requests as a workload: traces of Azure, BurstGPT and Mooncake."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from costmodel.base.errors import InputError
from costmodel.base.input_files import read_text
from costmodel.machines.record_file import explain_problems
from e2e.serving.serving_request import MOST_REQUESTS
from e2e.serving.workload import Workload

MOONCAKE_BLOCK = 512
_Tokens = Annotated[int, Field(ge=0, le=10_000_000)]


class _Azure(BaseModel):
    """Row of Azure's LLM inference traces (2023, 2024), CSV."""

    when: datetime = Field(alias="TIMESTAMP")
    prompt: _Tokens = Field(alias="ContextTokens")
    output: _Tokens = Field(alias="GeneratedTokens")

    @property
    def seconds(self) -> float:
        """Time of arrival."""
        return (self.when if self.when.tzinfo else self.when.replace(tzinfo=UTC)).timestamp()


class _BurstGpt(BaseModel):
    """Row of BurstGPT, CSV; responses of 0 tokens failed."""

    seconds: FiniteFloat = Field(alias="Timestamp")
    prompt: _Tokens = Field(alias="Request tokens")
    output: _Tokens = Field(alias="Response tokens")


class _Mooncake(BaseModel):
    """Line of Mooncake's traces, JSON; ``prefix``: one identity per block of 512 tokens, equal for equal prefixes."""

    milliseconds: FiniteFloat = Field(alias="timestamp")
    prompt: _Tokens = Field(alias="input_length")
    output: _Tokens = Field(alias="output_length")
    prefix: tuple[int, ...] | None = Field(None, alias="hash_ids")
    priority: int = 0

    @property
    def seconds(self) -> float:
        """Time of arrival."""
        return self.milliseconds / 1e3


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
        raise InputError(f"{path}, line {number}: {explain_problems(error)}; correct it") from None
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
