"""The sections of ``python -m e2e validate``: each predicts what was measured, as a JSON document and as text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from costmodel.base.errors import InputError
from e2e.validate.replay import Replay, replay_public

# What --only is compared with.
REPLAY_CASE = "v100-sxm2-32gb/dlrm-8-ranks"


class Section(Protocol):
    """One section that has run."""

    def record(self) -> dict[str, Any]:
        """JSON-able content."""
        ...

    def render(self) -> None:
        """Prints it for people."""
        ...


@dataclass(frozen=True)
class _Models:
    validation: Any

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = self.validation.record()
        return found

    def render(self) -> None:
        from e2e.validate.validation import render_validation

        render_validation(self.validation)


@dataclass(frozen=True)
class _Replayed:
    replay: Replay

    def record(self) -> dict[str, Any]:
        return self.replay.record()

    def render(self) -> None:
        render_replay(self.replay)


def run_sections(data: Path, only: str = "", names: Sequence[str] = (), *, sealed: bool = False) -> dict[str, Section]:
    """Runs the sections ``names``, in their order; default: all with a case that contains ``only``, but for those whose
    data `data fetch` does not bring and that are not there.

    ``InputError`` for an unknown section, for absent data, and if no case contains ``only``.
    """
    if sealed:
        return _sealed(data, only, names)
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise InputError(f"--section {unknown[0]}: there are {', '.join(SECTIONS)}")
    chosen = [name for name in SECTIONS if name in names or (not names and _is_there(name, data))]
    found = {name: SECTIONS[name](data, only) for name in chosen}
    ran = {name: section for name, section in found.items() if section is not None}
    if not ran:
        raise InputError(f"{data}: no case contains {only!r}; leave --only out to see all")
    return ran


def _sealed(data: Path, only: str, names: Sequence[str]) -> dict[str, Section]:
    """The rows of training steps that are kept until a release is judged, alone."""
    from e2e.validate.training_rows import KINDS_FILE, read_kinds_rows
    from e2e.validate.training_section import training_section

    if any(name != "training" for name in names):
        raise InputError("--sealed: sealed rows are of training steps; give --section training, or none")
    rows = read_kinds_rows(data, sealed=True)
    if not rows:
        raise InputError(f"{data / KINDS_FILE}: has no sealed rows; give --data, the folder that they were drawn from")
    found = training_section(rows, only)
    if found is None:
        raise InputError(f"{data}: no sealed case contains {only!r}; leave --only out to see all")
    return {"training": found}


def _is_there(section: str, data: Path) -> bool:
    from e2e.validate.training_rows import TRAINING_FILE

    return section not in ("training", "memory") or (data / TRAINING_FILE).exists()


def _models(data: Path, only: str) -> Section | None:
    from e2e.validate.validation import cases, validate

    if not any(only in f"{case.gpu}/{case.name}" for case in cases(data)):
        return None
    return _Models(validate(data, only))


def _replay(data: Path, only: str) -> Section | None:
    return _Replayed(replay_public(data)) if only in REPLAY_CASE else None


def _jobs(data: Path, only: str) -> Section | None:
    from e2e.validate.jobs_section import jobs_section

    return jobs_section(data, only)


def _vtrain(data: Path, only: str) -> Section | None:
    from e2e.validate.vtrain_section import vtrain_section

    return vtrain_section(data, only)


def _training(data: Path, only: str) -> Section | None:
    from e2e.validate.training_rows import (
        KINDS_FILE,
        TRAINING_FILE,
        read_held_out_rows,
        read_kinds_rows,
        read_training_rows,
    )
    from e2e.validate.training_section import training_section

    published = read_held_out_rows()
    if (data / KINDS_FILE).exists():
        published += read_kinds_rows(data)
    # Rows of the project do without the data; where others are asked for, an absent table is named.
    asked_for = bool(only) and any(only in f"{row.gpu}/{row.name}" for row in published)
    table = read_training_rows(data) if (data / TRAINING_FILE).exists() or not asked_for else []
    return training_section([*table, *published], only, anew=not only)


def _vision(data: Path, only: str) -> Section | None:
    from e2e.validate.vision_section import vision_section

    return vision_section(data, only)


def _memory(data: Path, only: str) -> Section | None:
    from e2e.validate.memory_section import memory_section

    return memory_section(data, only)


SECTIONS: dict[str, Callable[[Path, str], Section | None]] = {
    "training": _training,
    "memory": _memory,
    "models": _models,
    "replay": _replay,
    "dlrm": _jobs,
    "vtrain": _vtrain,
    "vision": _vision,
}


def render_replay(replay: Replay) -> None:
    """Every rank and every collective, recorded and simulated."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140, no_color=not sys.stdout.isatty())
    console.print(f"replayed with measured kernel, transfer and host times: {replay.source}", soft_wrap=True)
    table = Table("rank", "operators linked", "recorded ms", "simulated ms", "error", box=None)
    for rank in replay.ranks:
        linked = "" if rank.linked is None else f"{rank.linked[0]} of {rank.linked[1]}"
        recorded, simulated = rank.recorded_seconds * 1e3, rank.simulated_seconds * 1e3
        table.add_row(str(rank.rank), linked, f"{recorded:.3f}", f"{simulated:.3f}", f"{rank.error:+.2%}")
    console.print(table)
    table = Table(
        "collective",
        "sequence",
        "ranks",
        "bytes",
        "transfer us",
        "longest wait us",
        "largest error of its end",
        box=None,
    )
    for each in replay.collectives:
        table.add_row(
            each.kind,
            str(each.sequence),
            str(each.ranks),
            f"{each.size_bytes:,}",
            f"{each.transfer_seconds * 1e6:.0f}",
            f"{each.longest_wait_seconds * 1e6:.0f}",
            f"{each.end_error:.2%} of the step",
        )
    console.print(table)
    console.print(
        f"{len(replay.ranks)} ranks: largest error of a step {replay.worst_rank:.2%}, of a collective's end "
        f"{replay.worst_collective:.2%} of the step; whole job {replay.step_error:+.2%}"
    )
