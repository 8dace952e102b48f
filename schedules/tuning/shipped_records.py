"""Measured kernels of one CPU in one small file, shipped with the project as the starting point of tuning on that CPU.

``schedules/tuning/shipped/CPU/records.jsonl.gz``: a line with the CPU, the versions and the origin of the
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
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import MALFORMED, decoded, open_unpacked
from costmodel.base.output_files import write_whole
from costmodel.cost_model import Config, Measurement, config_key
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import template_revision
from schedules.tuning.tuning_records import Record, environment

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
        raise InputError(f"{path}: not a file of kernel records; `python -m lab.records collect` makes one")
    return header, lines


def _lines(path: Path) -> Iterator[str]:
    with open_unpacked(path, "table") as stream, io.TextIOWrapper(stream, encoding="utf-8") as lines:
        yield from lines


def _identity(header: Mapping[str, Any]) -> CpuIdentity:
    fields = header["cpu"]
    return CpuIdentity(**{**fields, "features": tuple(fields["features"])})


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: kernel records are damaged ({error}); collect them again, or remove the file")
