"""Collection of records to be shipped from the folders that `tune` wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import decoded
from costmodel.model.measurements import ConfigKey, config_key
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import template_revision
from schedules.records.cpu_identity import identity_of
from schedules.records.record_store import RECORDS, read_lines
from schedules.records.shipped_records import CpuRecords, KernelRecords, merged
from schedules.records.tuning_records import Record, environment, parse_line

# Configurations kept per kernel: more add little information, and the file is part of the package.
ROWS_PER_KERNEL = 200


@dataclass(frozen=True)
class Collected:
    """Records to be shipped; ``left_out``: reason -> number of records not included."""

    content: CpuRecords
    left_out: Counter[str] = field(default_factory=Counter)


def collect(
    folders: Sequence[Path],
    cpu: CpuTarget,
    note: str = "",
    keep: Callable[[str], bool] = lambda network: True,
    rows: int = ROWS_PER_KERNEL,
) -> Collected:
    """Collect the records of ``cpu``, on any number of threads, in build folders of ``tune`` (or folders of records).

    ``keep``: selects networks by name. Records of another CPU, TVM or revision of the templates are left out and
    counted. Raises ``InputError`` for a folder without records, or if nothing is left.
    """
    own = environment(cpu)
    identity = identity_of(cpu)
    left_out: Counter[str] = Counter()
    kernels: list[KernelRecords] = []
    for folder in folders:
        path = records_folder(folder) / RECORDS
        network = network_name(folder)
        if not keep(network):
            left_out[f"of {network}"] += sum(1 for _ in read_lines(path, parse_line))
            continue
        measured = datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
        last: dict[tuple[Operator, int], dict[ConfigKey, Record]] = {}
        for record, made in _ours(path, left_out):
            here = {**own, "templates": template_revision(record.operator.dtype)}
            reason = _reason(made, here, lambda threads: identity.target(threads).key)
            if reason is not None:
                left_out[reason] += 1
                continue
            known = last.setdefault((record.operator, _threads(made["cpu"])), {})
            known[config_key(record.config)] = record
        kernels += [
            KernelRecords(operator, threads, (network,), measured, tuple(records.values()))
            for (operator, threads), records in last.items()
        ]
    if not kernels:
        raise InputError(
            f"{', '.join(map(str, folders))}: no records of this CPU and this version of the templates; "
            "`python -m fusion tune` here makes some"
        )
    return Collected(CpuRecords(identity, own["tvm"], own["templates"], note, merged(kernels, rows)), left_out)


def network_name(folder: Path) -> str:
    """Stem of the ONNX file in the folder's summary; without a summary the name of the folder."""
    try:
        return Path(decoded(read_text(folder / "summary.json", "record"))["model"]).stem
    except (OSError, ValueError, KeyError, TypeError):
        return folder.resolve().name


def records_folder(folder: Path) -> Path:
    """Records folder of a build folder, or the folder itself if it has records; raises ``InputError`` without any."""
    for path in (folder / "records", folder):
        if (path / RECORDS).is_file():
            return path
    raise InputError(f"{folder}: holds no tuning records; name folders that `python -m fusion tune` wrote")


def _ours(path: Path, left_out: Counter[str]) -> Iterator[tuple[Record, dict[str, str]]]:
    for entry in read_lines(path, parse_line):
        if entry is None:
            left_out["not of this project"] += 1
        else:
            yield entry


def _reason(made: dict[str, str], own: dict[str, str], key: Callable[[int], str]) -> str | None:
    """Reason why records of the environment ``made`` are not valid here, or None."""
    if made["templates"] != own["templates"]:
        return f"of revision {made['templates']} of the templates, not {own['templates']}"
    if made["tvm"] != own["tvm"]:
        return f"of TVM {made['tvm']}, not {own['tvm']}"
    return None if made["cpu"] == key(_threads(made["cpu"])) else "of another CPU"


def _threads(key: str) -> int:
    return int(key.rpartition("threads=")[2])
