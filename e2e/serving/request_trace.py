"""Recorded requests as a workload: traces of Azure, BurstGPT and Mooncake.

- Azure LLM inference traces (2023, 2024), CSV: ``TIMESTAMP`` (date and time), ``ContextTokens``, ``GeneratedTokens``;
- BurstGPT, CSV: ``Timestamp`` (seconds), ``Request tokens``, ``Response tokens``; responses of 0 tokens failed, and are
  left out;
- Mooncake, a JSON object per line: ``timestamp`` (milliseconds), ``input_length``, ``output_length``, ``hash_ids`` (one
  per block of 512 tokens, equal for equal prefixes), and ``priority`` if there is one.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.input_files import read_text
from e2e.serving.serving_request import MOST_REQUESTS
from e2e.serving.workload import Workload

MOONCAKE_BLOCK = 512
_MOST_TOKENS = 10_000_000


@dataclass(frozen=True)
class _Row:
    when: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()
    priority: int = 0


def _instant(text: str) -> float:
    """Seconds of a date and time with or without a zone, and with as many digits of seconds as are written."""
    whole, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    moment = datetime.fromisoformat(whole + rest[len(digits) :])
    begin = datetime(1970, 1, 1, tzinfo=moment.tzinfo)
    return (moment - begin).total_seconds() + (float(f"0.{digits}") if dot and digits else 0.0)


# Columns of time, prompt and output, and how a time is read.
_FORMS: tuple[tuple[tuple[str, str, str], Callable[[str], float]], ...] = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _instant),
    (("Timestamp", "Request tokens", "Response tokens"), float),
)
_MOONCAKE = ("timestamp", "input_length", "output_length")


def read_trace(path: Path, concurrency: int | None = None, duration: float | None = None) -> Workload:
    """The requests of ``path`` in the order of their arrivals, the first at 0 s, those up to ``duration`` seconds.

    With ``concurrency`` its arrivals do not count: so many clients send the requests in this order, each after the
    answer to the one before. Raises ``InputError`` naming file and line for anything but a trace.
    """
    try:
        text = read_text(path, "trace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: is no text ({error}); give a trace as .csv or .jsonl") from None
    lines = text.lstrip("\ufeff").splitlines()
    first = next((each.lstrip() for each in lines if each.strip()), "")
    rows = sorted(_objects(path, lines) if first.startswith("{") else _records(path, lines), key=lambda row: row.when)
    if duration is not None and rows:
        rows = [each for each in rows if each.when - rows[0].when <= duration]
    if not rows:
        raise InputError(f"{path}: has no request that was answered; give a trace with rows")
    prefixes, priorities = [each.prefix for each in rows], [each.priority for each in rows]
    return Workload(
        np.array([each.prompt for each in rows]),
        np.array([each.output for each in rows]),
        np.array([each.when - rows[0].when for each in rows]) if concurrency is None else None,
        min(concurrency or 0, len(rows)),
        priorities=np.array(priorities) if any(priorities) else None,
        prefixes=prefixes if any(prefixes) else None,
        prefix_block=MOONCAKE_BLOCK if any(prefixes) else 0,
    )


def _records(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    table = csv.reader(lines)
    try:
        header = [each.strip() for each in next(table, [])]
        found = next((form for form in _FORMS if set(form[0]) <= set(header)), None)
        if found is None:
            known = "; ".join(", ".join(names) for names, _ in _FORMS)
            raise InputError(
                f"{path}, line 1: has the columns {', '.join(header) or 'none'}; give those of Azure or BurstGPT "
                f"({known}), or is JSON per line as Mooncake's ({', '.join(_MOONCAKE)})"
            )
        names, seconds = found
        places = [header.index(name) for name in names]
        for number, cells in enumerate(table, 2):
            if not any(each.strip() for each in cells):
                continue
            if len(cells) <= max(places):
                raise InputError(f"{path}, line {number}: has {len(cells)} columns, fewer than line 1; correct it")
            row = _row(path, number, dict(zip(names, (cells[place] for place in places), strict=True)), names, seconds)
            if row.output:
                yield row
    except csv.Error as error:
        raise InputError(f"{path}, line {table.line_num}: is no CSV ({error}); correct it") from None


def _objects(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: is no JSON object ({error}); correct it") from None
        missing = [name for name in _MOONCAKE if not isinstance(found, dict) or name not in found]
        if missing:
            raise InputError(f"{path}, line {number}: has no {missing[0]}; each line has {', '.join(_MOONCAKE)}")
        row = _row(path, number, found, _MOONCAKE, lambda value: float(value) / 1e3)
        blocks = found.get("hash_ids") or ()
        if not isinstance(blocks, list | tuple) or not all(isinstance(each, int) for each in blocks):
            raise InputError(f"{path}, line {number}: hash_ids is no list of whole numbers; correct it")
        priority = found.get("priority", 0)
        if not isinstance(priority, int):
            raise InputError(f"{path}, line {number}: priority {priority!r} is no whole number; correct it")
        if row.output:
            yield _Row(row.when, row.prompt, row.output, tuple(blocks), priority)


def _row(path: Path, number: int, cells: dict[str, Any], names: Iterable[str], seconds: Callable[[Any], float]) -> _Row:
    when_name, *counts = names
    if number > MOST_REQUESTS + 1:
        raise InputError(
            f"{path}, line {number}: at most {MOST_REQUESTS:,} requests are taken; give a part of the trace"
        )
    try:
        when = seconds(cells[when_name])
        if not math.isfinite(when):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{path}, line {number}: {when_name} {cells[when_name]!r} is no time; correct it") from None
    found = []
    for name in counts:
        try:
            value = float(cells[name])
            if not (value == int(value) and 0 <= value <= _MOST_TOKENS):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            raise InputError(
                f"{path}, line {number}: {name} {cells[name]!r} is no number of tokens to {_MOST_TOKENS:,}; correct it"
            ) from None
        found.append(int(value))
    return _Row(when, max(found[0], 1), found[1])
