"""Parser of ``--what-if`` texts into records of changes. Errors name the text and the valid forms."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number


@dataclass(frozen=True)
class BatchChange:
    """Change of the samples per step."""

    samples: int


@dataclass(frozen=True)
class BucketChange:
    """Change of the size of the gradient buckets of data parallelism, in MiB."""

    mebibytes: float


@dataclass(frozen=True)
class BatchedLookups:
    """Merge of separate lookups in embedding tables of one shape into one batched lookup."""


@dataclass(frozen=True)
class FusedOperators:
    """Fusion of chains of element-wise operators whose names match ``pattern`` into one kernel each."""

    pattern: str


@dataclass(frozen=True)
class FasterKernels:
    """Division of the time of kernels of a family, or of operators whose names match ``pattern``, by ``factor``."""

    pattern: str
    factor: float


@dataclass(frozen=True)
class FasterHost:
    """Division of the host time by ``factor``."""

    factor: float


@dataclass(frozen=True)
class OtherHost:
    """Replacement of the host overheads by those of ``table``: a file, or a host known by name."""

    table: Path


Change = BatchChange | BucketChange | BatchedLookups | FusedOperators | FasterKernels | FasterHost | OtherHost
MOST_FACTOR = 1e6  # largest speed-up: practically removes the kernel
# Order in which changes are applied: another batch has other kernels, which are then fused and made faster.
ORDER: tuple[type, ...] = get_args(Change)
# Changes of which a step can have only one of each name.
_ONCE = {BatchChange: "batch", BucketChange: "bucket-mb", BatchedLookups: "batch-embeddings", FasterHost: "host",
         OtherHost: "host"}  # fmt: skip


@dataclass(frozen=True)
class WhatIf:
    """One question: its ``text`` as given, its ``changes``, and the text of each change."""

    text: str
    changes: tuple[Change, ...]
    texts: tuple[str, ...] = ()

    @property
    def ordered(self) -> tuple[Change, ...]:
        """Changes in the order in which they are applied."""
        return tuple(sorted(self.changes, key=lambda change: ORDER.index(type(change))))


def parse_what_if(text: str) -> WhatIf:
    """Parse e.g. ``"batch=512+host=1.5x"``; raises ``InputError`` for anything but :data:`FORMS`."""
    parts = [part.strip() for part in _BETWEEN.split(text)]
    changes = tuple(_change(part, text) for part in parts)
    twice = _clash(changes)
    if twice is not None:
        raise InputError(f"--what-if {text}: {twice} twice in one step; give them as two questions")
    return WhatIf(text, changes, tuple(parts))


def all_together(questions: Sequence[WhatIf]) -> WhatIf | None:
    """Combine all changes of ``questions`` in one step; ``None`` if that equals one of them, or is not possible."""
    pairs = {
        change: text for each in questions for change, text in zip(each.changes, each.texts, strict=True)
    }  # fmt: skip
    if any(set(each.changes) == set(pairs) for each in questions) or _clash(tuple(pairs)) is not None:
        return None
    return WhatIf("+".join(pairs.values()), tuple(pairs), tuple(pairs.values()))


def _clash(changes: Sequence[Change]) -> str | None:
    names = [_ONCE[type(change)] for change in changes if type(change) in _ONCE]
    return next((name for name in names if names.count(name) > 1), None)


def _change(part: str, text: str) -> Change:
    for head, read in _READERS.items():
        if part == head or (part.startswith(head) and head[-1] in "=:"):
            try:
                return read(part[len(head) :])
            except ValueError as error:
                raise InputError(f"--what-if {text}: {error}") from None
    raise InputError(f"--what-if {text}: {part or 'nothing'!r} is none of {', '.join(FORMS)}; write one of these")


def _batch(value: str) -> BatchChange:
    samples = whole_number(value)
    if not samples:
        raise ValueError("batch= takes a number of samples, such as batch=512")
    return BatchChange(samples)


def _bucket(value: str) -> BucketChange:
    return BucketChange(_positive(value, "bucket-mb= takes a size in MiB, such as bucket-mb=50"))


def _lookups(value: str) -> BatchedLookups:
    return BatchedLookups()


def _fuse(value: str) -> FusedOperators:
    return FusedOperators(_pattern(value, "fuse:"))


def _kernels(value: str) -> FasterKernels:
    pattern, _, factor = value.rpartition("=")
    return FasterKernels(
        _pattern(pattern, "kernels:"), _times(factor, "kernels: takes NAME=Kx, such as kernels:gemm=2x")
    )


def _host(value: str) -> FasterHost | OtherHost:
    if re.fullmatch(r"[\d.]+x?", value):
        return FasterHost(_times(value, _HOST))
    if not value:
        raise ValueError(_HOST)
    return OtherHost(Path(value))


_HOST = "host= takes Kx, such as host=1.5x, a file of host overheads, or a host known by name"


def _times(value: str, form: str) -> float:
    factor = _positive(value.removesuffix("x"), form)
    if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        raise ValueError(f"{value}: K must be from {1 / MOST_FACTOR:g} to {MOST_FACTOR:g}")
    return factor


def _positive(value: str, form: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(form) from None
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(form)
    return number


def _pattern(value: str, form: str) -> str:
    if not value:
        raise ValueError(f"{form} needs a name or a regular expression of operators' names")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(
            f"{form}{value} is no regular expression ({error}); put a backslash before its special signs"
        ) from None
    return value


_READERS: dict[str, Callable[[str], Change]] = {
    "batch=": _batch,
    "bucket-mb=": _bucket,
    "batch-embeddings": _lookups,
    "fuse:": _fuse,
    "kernels:": _kernels,
    "host=": _host,
}
# A plus sign inside a regular expression does not separate changes.
_BETWEEN = re.compile(rf"\+(?={'|'.join(_READERS)})")
FORMS = (
    "batch=N", "kernels:FAMILY=Kx", "host=Kx", "host=FILE", "bucket-mb=N", "batch-embeddings", "fuse:REGEX",
)  # fmt: skip
