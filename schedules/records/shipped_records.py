"""Measured kernels of one CPU in one small file, shipped with the project as the starting point of tuning on that CPU;
and their collection from the folders that `tune` wrote.

``schedules/records/shipped/CPU/records.jsonl.gz``: a line with the CPU, the versions and the origin of the
measurements, then a line for every (operator, threads) with all its configurations, slow ones included, as the ranking
is trained on them too. In the same folder are ``machine.yaml``, the rates of that CPU, and ``ranking.json.gz``, the
trained ranking (:mod:`schedules.tuning.kernel_ranking`).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import MALFORMED, decoded, open_unpacked, read_text
from costmodel.base.output_files import write_whole
from costmodel.cost_model import Config, ConfigKey, Measurement, config_key
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import template_revision
from schedules.records.tuning_records import RECORDS, Record, environment, parse_line, read_lines

_NAMED_BY = ("vendor_id", "cpu family", "model", "stepping")


@dataclass(frozen=True)
class CpuIdentity:
    """Identity of a CPU; the fields after ``chip`` are those of :class:`schedules.contract.cpu_target.CpuTarget`."""

    # Vendor, family, model and stepping from CPUID, which virtual machines do not change.
    chip: str
    mcpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    l1_bytes: int
    l2_bytes: int

    def runs_alike(self, other: CpuIdentity) -> bool:
        """True if both get the same code, with the same cache sizes."""
        return replace(self, chip=other.chip) == other

    def distance(self, other: CpuIdentity) -> float:
        """Dissimilarity of the code of both; infinite with other vectors or registers, whose configuration spaces
        differ.

        A feature of only one CPU counts as much as caches twice as large.
        """
        if (self.lanes, self.registers) != (other.lanes, other.registers):
            return math.inf
        caches = ((self.l1_bytes, other.l1_bytes), (self.l2_bytes, other.l2_bytes))
        features = len(set(self.features) ^ set(other.features)) + (self.mcpu != other.mcpu)
        return features + sum(abs(math.log2(one / two)) for one, two in caches)

    def target(self, threads: int) -> CpuTarget:
        """This CPU with ``threads`` threads."""
        return CpuTarget(
            self.lanes, self.registers, self.mcpu, self.features, threads, self.l1_bytes, self.l2_bytes
        )  # fmt: skip


def identity_of(cpu: CpuTarget) -> CpuIdentity:
    """Identity of ``cpu``, which must be the CPU of this process."""
    return CpuIdentity(
        chip_name(), cpu.mcpu, cpu.features, cpu.lanes, cpu.registers, cpu.l1_bytes, cpu.l2_bytes
    )  # fmt: skip


def chip_name(cpuinfo: str | None = None) -> str:
    """Vendor, family, model and stepping, e.g. ``AuthenticAMD 25/17/1``; empty if unknown."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return ""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    vendor, *numbers = (fields.get(name, "") for name in _NAMED_BY)
    return f"{vendor} {'/'.join(numbers)}" if vendor and all(numbers) else ""


SHIPPED_DIRECTORY = Path(__file__).parent / "shipped"
RECORDS_FILE = "records.jsonl.gz"
MACHINE_FILE = "machine.yaml"
RANKING_FILE = "ranking.json.gz"
# Environment variable with a folder that replaces the shipped one.
DIRECTORY_VARIABLE = "FUSION_RECORDS"
_FORMAT = 1


@dataclass(frozen=True)
class KernelRecords:
    """All measured configurations of ``operator`` on ``threads`` threads."""

    operator: Operator
    threads: int
    # Networks in which the operator occurs.
    networks: tuple[str, ...]
    # Day of the last measurement, ISO 8601.
    measured: str
    records: tuple[Record, ...]

    @property
    def best(self) -> Record:
        """Fastest record that won a comparison, or the fastest of all if there is none."""
        confirmed = [record for record in self.records if record.confirmed]
        return min(confirmed or self.records, key=lambda record: record.seconds)

    @property
    def measurements(self) -> list[Measurement]:
        """Records as measurements for training a cost model."""
        return [Measurement(record.operator, record.config, record.seconds) for record in self.records]

    def near_best(self, ratio: float, count: int) -> list[Config]:
        """Up to ``count`` configurations: that of :attr:`best`, then the fastest others within ``ratio`` of it."""
        best = self.best
        others = sorted((each for each in self.records if each.config != best.config), key=lambda each: each.seconds)
        near = [each.config for each in others if each.seconds <= ratio * best.seconds]
        return [best.config, *near[: count - 1]]


@dataclass(frozen=True)
class CpuRecords:
    """Measurements on ``cpu`` with one version of TVM and one revision of the templates; ``note``: description in
    words.
    """

    cpu: CpuIdentity
    tvm: str
    templates: str
    note: str
    kernels: tuple[KernelRecords, ...]

    @property
    def networks(self) -> tuple[str, ...]:
        """All networks in it, sorted."""
        return tuple(sorted({network for kernel in self.kernels for network in kernel.networks}))

    def without(self, network: str) -> CpuRecords:
        """Records without the operators of ``network``."""
        kept = tuple(kernel for kernel in self.kernels if network not in kernel.networks)
        return CpuRecords(self.cpu, self.tvm, self.templates, self.note, kept)

    def of(self, threads: int) -> Mapping[Operator, KernelRecords]:
        """Records on ``threads`` threads by operator."""
        return {kernel.operator: kernel for kernel in self.kernels if kernel.threads == threads}


@dataclass(frozen=True)
class FoundRecords:
    """Records that fit the present CPU."""

    directory: Path
    content: CpuRecords
    # Measured on a chip of the same name, so that times are valid; otherwise configurations are only guesses.
    same_chip: bool
    # From a CPU with the same features and caches; otherwise from the nearest one.
    same_code: bool = True


def write_records(path: Path, content: CpuRecords) -> None:
    """Write the file, deterministically; raise ``OutputError`` on failure."""
    header = {
        "format": _FORMAT,
        "cpu": asdict(content.cpu),
        "tvm": content.tvm,
        "templates": content.templates,
        "note": content.note,
    }
    lines = [json.dumps(header), *sorted(json.dumps(_kernel_line(kernel)) for kernel in content.kernels)]
    data = gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}; choose another place, or free some") from error


def read_records(path: Path) -> CpuRecords:
    """Read a file of :func:`write_records`, without kernels of narrow dtypes from an outdated template revision.

    Raises ``InputError`` that names the file and the remedy.
    """
    header, lines = _header(path)
    try:
        kernels = tuple(_kernel(content) for content in map(decoded, lines) if _is_current(content))
        return CpuRecords(_identity(header), header["tvm"], header["templates"], header["note"], kernels)
    except (OSError, EOFError, zlib.error, *MALFORMED) as error:
        raise _damaged(path, error) from error


def records_directory() -> Path:
    """``$FUSION_RECORDS`` if set, otherwise the folder of the package."""
    override = os.environ.get(DIRECTORY_VARIABLE)
    return Path(override) if override else SHIPPED_DIRECTORY


@lru_cache(maxsize=4)
def find_records(cpu: CpuTarget, directory: Path | None = None, nearest: bool = False) -> FoundRecords | None:
    """Find the records in ``directory`` (default: :func:`records_directory`) of a CPU that runs the same code as
    ``cpu``.

    They must be made with this version of TVM and of the templates; those of the same chip are preferred. None without
    any. ``nearest``: if there are none, use those of another CPU with the same vectors.
    """
    here, own = identity_of(cpu), environment(cpu)
    fitting: list[tuple[float, bool, Path, bool]] = []
    for path in sorted((directory or records_directory()).glob(f"*/{RECORDS_FILE}")):
        header, _ = _header(path)
        try:
            identity = _identity(header)
            current = (header["tvm"], header["templates"]) == (own["tvm"], own["templates"])
            distance = identity.distance(here)
        except MALFORMED as error:
            raise _damaged(path, error) from error
        alike = identity.runs_alike(here)
        if current and (alike or (nearest and math.isfinite(distance))):
            same_chip = alike and bool(here.chip) and identity.chip == here.chip
            fitting.append((distance, not same_chip, path, alike))
    if not fitting:
        return None
    _, another_chip, path, alike = min(fitting)
    return FoundRecords(path.parent, read_records(path), not another_chip, alike)


def thinned(records: Sequence[Record], limit: int) -> list[Record]:
    """At most ``limit`` records: all winners of comparisons, the fastest half, and an even selection of the others."""
    ordered = sorted(records, key=lambda each: (not each.confirmed, each.seconds, config_key(each.config)))
    if len(ordered) <= limit:
        return ordered
    head = max(limit // 2, sum(record.confirmed for record in ordered))
    rest, places = ordered[head:], max(0, limit - head)
    return ordered[:head] + [rest[index * len(rest) // places] for index in range(places)]


def _is_current(line: Mapping[str, Any]) -> bool:
    """True if the template revision of its dtype is current; for float32 the header has been checked."""
    dtype = from_record(line["operator"]).dtype
    return dtype == "float32" or line["templates"] == template_revision(dtype)


def _kernel_line(kernel: KernelRecords) -> dict[str, Any]:
    """Record line: times in nanoseconds; a row is the values of the knobs, the time, and 1 for a winner of a
    comparison.
    """
    dtype = kernel.operator.dtype
    knobs = sorted({knob for record in kernel.records for knob in record.config})
    rows = [
        [*(record.config.get(knob) for knob in knobs), round(1e9 * record.seconds), int(record.confirmed)]
        for record in sorted(kernel.records, key=lambda each: config_key(each.config))
    ]
    return {
        "operator": to_record(kernel.operator),
        "threads": kernel.threads,
        "networks": list(kernel.networks),
        "measured": kernel.measured,
        **({} if dtype == "float32" else {"templates": template_revision(dtype)}),
        "knobs": knobs,
        "rows": rows,
    }


def _kernel(line: Mapping[str, Any]) -> KernelRecords:
    operator, knobs = from_record(line["operator"]), line["knobs"]
    records = tuple(
        Record(
            operator,
            {knob: int(value) for knob, value in zip(knobs, values, strict=True) if value is not None},
            1e-9 * nanoseconds,
            bool(confirmed),
        )
        for *values, nanoseconds, confirmed in line["rows"]
    )
    if not records or not all(record.seconds > 0 for record in records):
        raise ValueError("an operator without times above zero")
    return KernelRecords(operator, int(line["threads"]), tuple(line["networks"]), line["measured"], records)


def _header(path: Path) -> tuple[Mapping[str, Any], Iterator[str]]:
    """Parsed first line, and an iterator over the others, which are read on demand."""
    lines = _lines(path)
    try:
        header = decoded(next(lines, "null"))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise InputError(f"{path}: not a file of kernel records; `python -m fusion records collect` makes one")
    return header, lines


def _lines(path: Path) -> Iterator[str]:
    with open_unpacked(path, "table") as stream, io.TextIOWrapper(stream, encoding="utf-8") as lines:
        yield from lines


def _identity(header: Mapping[str, Any]) -> CpuIdentity:
    fields = header["cpu"]
    return CpuIdentity(**{**fields, "features": tuple(fields["features"])})


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: kernel records are damaged ({error}); collect them again, or remove the file")


def merged(kernels: Iterable[KernelRecords], limit: int) -> tuple[KernelRecords, ...]:
    """Merge equal (operator, threads), with at most ``limit`` configurations each.

    For a configuration measured several times, a winner of a comparison is preferred, then the smallest time.
    """
    together: dict[tuple[Operator, int], list[KernelRecords]] = {}
    for kernel in kernels:
        together.setdefault((kernel.operator, kernel.threads), []).append(kernel)
    found = []
    for (operator, threads), group in together.items():
        records: dict[Any, Record] = {}
        for record in (record for kernel in group for record in kernel.records):
            known = records.setdefault(config_key(record.config), record)
            if (not record.confirmed, record.seconds) < (not known.confirmed, known.seconds):
                records[config_key(record.config)] = record
        networks = tuple(sorted({network for kernel in group for network in kernel.networks}))
        measured = max(kernel.measured for kernel in group)
        found.append(KernelRecords(operator, threads, networks, measured, tuple(thinned([*records.values()], limit))))
    return tuple(found)


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
