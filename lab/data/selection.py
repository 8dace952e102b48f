"""Which of the measurements count: the files that a fit was made from, and rows that stay sealed.

**Files**: a fitted file names those it was made from, by path within the data, in ``provenance.tables``.
``python -m lab.fit`` and ``validate`` only use the files that the shipped models name, with unchanged content: an
additional file in the folder changes no figure unless requested (``--all``).

**Rows** of published measurements that stay unseen until a release is validated, drawn by hash. The draw was made on
2026-11-23, before the work on version 1.1 began: one job in four of each table named in :data:`KEYS`. Models are made
and fitted without these rows; `validate` uses them once, at the end, and reports this beside the figure. A job that
occurs several times in a table (other releases, other precisions) is drawn as one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, Say
from costmodel.base.input_files import content_digest
from costmodel.collectives.calibration import DIRECTORY as MEASURED
from costmodel.collectives.engine_reduce import FILE as ENGINE_REDUCES
from costmodel.collectives.physics import FILE as CONSTANTS
from costmodel.gpu.families.family import SHARES
from costmodel.gpu.fitted import DIRECTORY, ENGINES, SCANS, SERVING, TRANSFER
from lab.data.aiconfigurator import attention_files, cast_files, expert_files, gemm_files, linear_files, serving_files
from lab.data.collective_sweeps import engine_sweep_files, sweep_files
from lab.data.data_folder import FETCH, Wanted, everything
from lab.data.engine_tables import engine_files
from lab.data.profiled_kernels import latency_files, layer_files
from lab.data.timm_steps import timm_files

_SHOWN = 3


@dataclass(frozen=True)
class Selection:
    """Files within the folder ``data``: ``used`` are named and unchanged; ``new`` are not named; named ones are
    ``missing`` or ``different`` (in content).
    """

    data: Path
    used: Sequence[str]
    new: Sequence[str]
    missing: Sequence[str]
    different: Sequence[str]

    def wants(self, path: Path) -> bool:
        """True if ``path`` is one of the files to use."""
        return path.is_relative_to(self.data) and path.relative_to(self.data).as_posix() in self.used

    @property
    def anything(self) -> bool:
        """True if the folder has any such file at all."""
        return bool(self.used or self.new or self.different)

    def require(self) -> None:
        """Raise :class:`InputError` unless every named file exists unchanged."""
        for what, files in (("missing", self.missing), ("not the file that was fitted to", self.different)):
            if files:
                raise InputError(
                    f"{self.data / files[0]}: {what}{_others(files)}; {FETCH} brings what the shipped models were "
                    "fitted to, --all fits to what is there, --data gives another folder"
                )

    def remarks(self) -> list[str]:
        """One line for each kind of difference between the folder, unless it is empty, and the named files."""
        kinds = (
            ("new, not used (use them with --all)", self.new),
            (f"missing ({FETCH} brings them)", self.missing),
            (f"not the files that the shipped models were fitted to, not used ({FETCH} or --all)", self.different),
        )
        lines = [f"{self.data}: {len(files)} {what}: {_first(files)}" for what, files in kinds if files]
        return lines if self.anything else []


def select(data: Path, found: Iterable[Path], fitted: Path) -> Selection:
    """Compare the files ``found`` below ``data`` with those that the fitted file ``fitted`` names."""
    names = named_in(fitted)
    present = {path.relative_to(data).as_posix(): path for path in found}
    same = {name for name, content in names.items() if name in present and content_digest(present[name]) == content}
    return Selection(
        data,
        used=sorted(same),
        new=sorted(set(present) - set(names)),
        missing=sorted(set(names) - set(present)),
        different=sorted((set(names) & set(present)) - same),
    )


def named_tables(rows: Mapping[Path, int], data: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Part of a fitted file's provenance: the files it came from, and the number of rows used of each."""
    named: dict[str, dict[str, dict[str, Any]]] = {"tables": {}, "own": {}}
    for path, count in rows.items():
        kind, root = ("own", MEASURED) if path.is_relative_to(MEASURED) else ("tables", data)
        named[kind][path.relative_to(root).as_posix()] = {"rows": count, "sha256": content_digest(path)}
    return {kind: files for kind, files in named.items() if files}


def named_in(fitted: Path) -> dict[str, str]:
    """SHA-256 by path within the data of the files that ``fitted`` names; ``InputError`` if it is corrupt."""
    try:
        tables = json.loads(fitted.read_text(encoding="utf-8"))["provenance"].get("tables", {})
        return {name: str(each["sha256"]) for name, each in tables.items()}
    except OSError as error:
        raise InputError(f"{fitted}: cannot be read ({error.strerror}); install the package again") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{fitted}: corrupt ({error!r}); write it anew with `python -m lab.fit --all`") from None


def _first(files: Sequence[str]) -> str:
    more = f" and {len(files) - _SHOWN} more" if len(files) > _SHOWN else ""
    return ", ".join(files[:_SHOWN]) + more


def _others(files: Sequence[str]) -> str:
    return f", and {len(files) - 1} more" if len(files) > 1 else ""


PARTS = ("kernels", "scans", "serving", "engine-kernels", "collectives", "engine-reduces", "vision")


def selection_of(part: str, data: Path) -> Selection:
    """Files of ``data`` that the shipped models of ``part`` name, and new, missing or different ones."""
    if part == "kernels":
        files = [*latency_files(data), *gemm_files(data), *layer_files(data), *attention_files(data)]
        files += [*expert_files(data), *cast_files(data)]
        return select(data, files, DIRECTORY / f"{TRANSFER}.json")
    if part == "scans":
        return select(data, linear_files(data), DIRECTORY / SCANS / f"{TRANSFER}.json")
    if part == "serving":
        return select(data, serving_files(data), DIRECTORY / SERVING / f"{TRANSFER}.json")
    if part == "engine-kernels":
        return select(data, engine_files(data), DIRECTORY / ENGINES / f"{TRANSFER}.json")
    if part == "engine-reduces":
        return select(data, engine_sweep_files(data), ENGINE_REDUCES)
    if part == "vision":
        return select(data, timm_files(data), SHARES)
    return select(data, sweep_files(data), CONSTANTS)


def wanted_files(part: str, data: Path, progress: Say, all_files: bool = False, *, whole: bool = False) -> Wanted:
    """Choose the files that the shipped models of ``part`` name, or ``all_files``; ``progress`` receives the others."""
    if all_files:
        return everything
    chosen = selection_of(part, data)
    if whole and chosen.anything:
        chosen.require()
    for line in chosen.remarks():
        progress(line)
    return chosen.wants


_SEED = "2026-11-23"
_ONE_IN = 4
Row = Mapping[str, str]


def _whole_step(row: Row) -> str:
    family = row["source"].split()[0]
    model = row["model"].split("(")[0].split(" BF16")[0].split(" FP8")[0].strip()
    model = model.replace("Grok1", "Grok 1").replace(" Dev", "")  # one model under three names
    return "|".join((family, model, row["gpu"], row["n_gpus"], row["seq"]))


# By the path within the data: the key that identifies a row's job.
KEYS: Mapping[str, Callable[[Row], str]] = {
    "whole_step/llm_training_kinds.csv": _whole_step,
    "megatron_golden/a100.csv.gz": lambda row: row["case"],
    "liger/kernels.csv.gz": lambda row: f"{row['kernel_name']}|{row['gpu_name']}",
    "scripts/published.csv": lambda row: f"{row['repo']}|{row['gpu']}|{row['config']}",
}


def is_sealed(table: str, row: Row) -> bool:
    """True if ``row`` of ``table`` (a key of :data:`KEYS`; columns by name) is excluded from every fit and choice."""
    drawn = hashlib.sha256(f"{_SEED} {KEYS[table](row)}".encode()).hexdigest()
    return int(drawn, 16) % _ONE_IN == 0
