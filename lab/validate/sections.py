"""Sections of ``python -m lab.validate``: each compares predictions with measurements, as a JSON document and
as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from costmodel.base.errors import InputError
from costmodel.gpu.fitted import DIRECTORY
from lab.command_line import chosen
from lab.data.data_folder import FETCH, Wanted
from lab.data.selection import PARTS, wanted_files
from lab.validate.cost_models import (
    KernelErrors,
    KernelSection,
    validate_attention,
    validate_collectives,
    validate_kernels,
    validate_scans,
    validate_serving,
)
from lab.validate.recorded_jobs import jobs_section, replay_public

# Case name of the replay for --only.
REPLAY_CASE = "v100-sxm2-32gb/dlrm-8-ranks"


class Section(Protocol):
    """Result of one section."""

    def record(self) -> dict[str, Any]:
        """JSON-able content."""
        ...

    def render(self) -> None:
        """Print the result as text."""
        ...


@dataclass(frozen=True)
class Asked:
    """Request of a validation: the cases of the folder ``data`` whose GPU/case contains ``only``; kernels are predicted
    by the fitted files of the folder ``models`` (default: the shipped ones), with ``all_files`` on every existing
    table.
    """

    data: Path
    only: str = ""
    models: Path | None = None
    all_files: bool = False


def run_sections(asked: Asked, names: Sequence[str] = (), *, sealed: bool = False) -> dict[str, Section]:
    """Run the sections ``names``, in their order; default: all that have a matching case, except those whose data `data
    fetch` does not provide and that are absent.

    ``InputError`` for an unknown section, for absent data, and if no case matches.
    """
    if sealed:
        return {"training": _sealed(asked, names)}
    wanted = [name for name in chosen(names, tuple(SECTIONS)) if names or _by_default(name, asked)]
    if asked.models is not None and not any(asked.models.rglob("*.json")):
        raise InputError(f"--models {asked.models}: holds no fitted models (*.json); `python -m lab.fit -o` makes them")
    found = {name: SECTIONS[name](asked) for name in wanted}
    ran = {name: section for name, section in found.items() if section is not None}
    if not ran:
        if asked.only:
            raise InputError(f"{asked.data}: no case contains {asked.only!r}; leave --only out to see all")
        raise InputError(
            f"{asked.data}: no measurements of what is asked; give the folder of the data with --data, or {FETCH} "
            "brings them"
        )
    return ran


def _sealed(asked: Asked, names: Sequence[str]) -> Section:
    """Section of only the sealed rows of training steps, which are kept until a release is validated."""
    from lab.steps.training import KINDS_FILE, read_kinds_rows
    from lab.validate.training import training_section

    if any(name != "training" for name in names):
        raise InputError("--sealed: sealed rows are of training steps; ask the section training, or none")
    rows = read_kinds_rows(asked.data, sealed=True)
    if not rows:
        where = asked.data / KINDS_FILE
        raise InputError(f"{where}: has no sealed rows; give --data, the folder that they were drawn from")
    found = training_section(rows, asked.only)
    if found is None:
        raise InputError(f"{asked.data}: no sealed case contains {asked.only!r}; leave --only out to see all")
    return found


def _by_default(section: str, asked: Asked) -> bool:
    """True if ``section`` runs by default. Tables of kernels are only validated whole, not for one case."""
    from lab.steps.training import TRAINING_FILE

    if section in ("training", "memory"):
        return (asked.data / TRAINING_FILE).exists()
    return section == "vision" or section not in PARTS or not asked.only


def _kernel_part(part: str, validated: Callable[[Asked, Wanted], list[KernelErrors]], asked: Asked) -> Section | None:
    progress = Console(stderr=True, highlight=False, markup=False)
    wanted = wanted_files(part, asked.data, partial(progress.print, soft_wrap=True), asked.all_files)
    results = [each for each in validated(asked, wanted) if asked.only in f"{each.machine}/{each.family}"]
    return KernelSection(results) if results else None


def _kernels(asked: Asked, wanted: Wanted) -> list[KernelErrors]:
    return [*validate_kernels(asked.data, asked.models or DIRECTORY, wanted), *validate_attention(asked.data, wanted)]


def _scans(asked: Asked, wanted: Wanted) -> list[KernelErrors]:
    return validate_scans(asked.data, asked.models or DIRECTORY, wanted)


def _serving(asked: Asked, wanted: Wanted) -> list[KernelErrors]:
    return validate_serving(asked.data, asked.models or DIRECTORY, wanted)


def _collectives(asked: Asked, wanted: Wanted) -> list[KernelErrors]:
    return validate_collectives(asked.data, wanted=wanted)


def _models(asked: Asked) -> Section | None:
    from lab.validate.models import models_section

    return models_section(asked.data, asked.only)


def _replay(asked: Asked) -> Section | None:
    return replay_public(asked.data) if asked.only in REPLAY_CASE else None


def _jobs(asked: Asked) -> Section | None:
    return jobs_section(asked.data, asked.only)


def _vtrain(asked: Asked) -> Section | None:
    from lab.validate.vtrain import vtrain_section

    return vtrain_section(asked.data, asked.only)


def _training(asked: Asked) -> Section | None:
    from lab.steps.training import KINDS_FILE, TRAINING_FILE, read_held_out_rows, read_kinds_rows, read_training_rows
    from lab.validate.training import training_section

    data, only = asked.data, asked.only
    published = read_held_out_rows()
    if (data / KINDS_FILE).exists():
        published += read_kinds_rows(data)
    # The project's own rows need no data; if other rows are requested, an absent table is named.
    asked_for = bool(only) and any(only in f"{row.gpu}/{row.name}" for row in published)
    table = read_training_rows(data) if (data / TRAINING_FILE).exists() or not asked_for else []
    return training_section([*table, *published], only, anew=not only)


def _vision(asked: Asked) -> Section | None:
    from lab.validate.models import vision_section

    return vision_section(asked.data, asked.only)


def _memory(asked: Asked) -> Section | None:
    from lab.validate.memory import memory_section

    return memory_section(asked.data, asked.only)


def _served(asked: Asked) -> Section | None:
    from lab.validate.serving import serving_section

    return serving_section(asked.data, asked.only)


SECTIONS: dict[str, Callable[[Asked], Section | None]] = {
    "training": _training,
    "memory": _memory,
    "models": _models,
    "replay": _replay,
    "dlrm": _jobs,
    "vtrain": _vtrain,
    "vision": _vision,
    "kernels": partial(_kernel_part, "kernels", _kernels),
    "scans": partial(_kernel_part, "scans", _scans),
    "serving-kernels": partial(_kernel_part, "serving", _serving),
    "serving": _served,
    "collectives": partial(_kernel_part, "collectives", _collectives),
}
