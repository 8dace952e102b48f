"""Tuning records on disk, in a MetaSchedule ``JSONDatabase`` that survives Ctrl-C, a kill and a full disk.

A line of ``database_tuning_record.json`` is ``[workload index, [[trace, decisions], [seconds], target, arguments]]``.
Our templates emit loops directly and do not schedule the naive ones, so the configuration *is* the decision: the trace
annotates the root block of the workload with it, as JSON text, and replaying the trace yields a function from whose
annotation it can be read. Reading needs no TVM. Lines are appended as a whole; a line left unfinished by a killed
process is removed with a warning by the next writer.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import MALFORMED, check_file, decoded, read_bytes, read_text
from costmodel.base.output_files import FolderLock, append_whole, lock_folder
from costmodel.cost_model import ConfigKey, config_key
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget, target_with
from schedules.contract.template import template_revision

ANNOTATION = "fusion.config"


@dataclass(frozen=True)
class Record:
    """``config`` of ``operator`` ran in ``seconds``. ``confirmed``: by a comparison with its best competitors."""

    operator: Operator
    config: Mapping[str, int]
    seconds: float
    confirmed: bool = False


@dataclass(frozen=True)
class Failure:
    """``config`` of ``operator`` failed, with kind and message of
    :class:`schedules.measuring.timing_protocol.MeasureOutcome`.
    """

    operator: Operator
    config: Mapping[str, int]
    error: str
    message: str


def environment(cpu: CpuTarget, dtype: str = "float32") -> dict[str, str]:
    """Conditions of a measured time of an operator of ``dtype`` besides operator and configuration.

    They are part of the key of all stored data.
    """
    return {"cpu": cpu.key, "tvm": version("apache-tvm"), "templates": template_revision(dtype)}


def annotation(record: Record, environment: Mapping[str, str]) -> str:
    """Text of the trace annotation: operator, configuration and the environment of the measurement."""
    content = {
        "operator": to_record(record.operator),
        "config": dict(record.config),
        "confirmed": record.confirmed,
        **environment,
    }
    text = json.dumps(content, sort_keys=True)
    # TVM quotes the text without escaping it, and does not unescape it when reading.
    assert "\\" not in text, text
    return text


def recorded_operator(record: Any) -> Operator:
    """Operator of a line; raises ``ValueError`` or ``TypeError`` if it is not a kernel's operator."""
    operator = from_record(record)
    if not isinstance(operator, Operator):
        raise ValueError("not an operator of a kernel")
    hash(operator)  # TypeError if its sizes are mappings
    return operator


def parse_line(line: str) -> tuple[Record, dict[str, str]] | None:
    """Record of a line and its environment, or None for a foreign line or another version of ours.

    Raises ``ValueError`` if it is not JSON.
    """
    content = decoded(line)
    try:
        _, ((instructions, _), run_seconds, *_) = content
        text = next((i[1][1] for i in instructions if i[0] == "Annotate" and i[2] == [ANNOTATION]), None)
        if text is None:
            return None
        fields = decoded(text[1:-1])
        operator = recorded_operator(fields.pop("operator"))
        config = {str(knob): int(value) for knob, value in fields.pop("config").items()}
        record = Record(operator, config, float(min(run_seconds)), bool(fields.pop("confirmed")))
    except MALFORMED:
        return None
    return record, fields


def workload_line(operator: Operator) -> str:
    """Line of ``database_workload.json``: the operator in framework layout and its structural hash."""
    from tvm.s_tir.meta_schedule.database import Workload

    return json.dumps(_plain(Workload(_workload(operator)).as_json()), separators=(",", ":"))


def record_line(record: Record, workload_index: int, environment: Mapping[str, str], target: Any) -> str:
    """Line of ``database_tuning_record.json``."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.meta_schedule.database import TuningRecord, Workload

    module = _workload(record.operator)
    schedule = Schedule(module)
    schedule.annotate(schedule.get_sblock("root"), ANNOTATION, annotation(record, environment))
    arguments = ArgInfo.from_prim_func(module["main"])
    entry = TuningRecord(schedule.trace, Workload(module), [record.seconds], target, arguments)
    return json.dumps([workload_index, _plain(entry.as_json())], separators=(",", ":"))


@lru_cache(maxsize=256)
def _workload(operator: Operator) -> Any:
    from schedules.contract.operator_workload import workload

    return workload(operator)


def read_config(function: Any) -> tuple[Operator, dict[str, int]] | None:
    """Operator and configuration annotated on ``function``'s root block, or None."""
    root = function.body
    annotations = getattr(getattr(root, "block", None), "annotations", {})
    if ANNOTATION not in annotations:
        return None
    fields = decoded(str(annotations[ANNOTATION]))
    return from_record(fields["operator"]), {knob: int(value) for knob, value in fields["config"].items()}


def _plain(value: Any) -> Any:
    """Convert TVM's containers and numbers to Python's."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "__iter__"):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, float) else int(value)


WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
FAILURES = "failures.jsonl"

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RecordStore:
    """Records of one CPU, version of TVM and revision of the templates in ``directory``; others are kept but ignored.

    ``allows``: records of other configurations are ignored too. One writer at a time (the lock is taken by
    :meth:`claim`, or at the first write); any number of readers. Raises ``InputError`` for a directory or file that
    cannot be read, ``OutputError`` for one that cannot be written.
    """

    def __init__(
        self,
        directory: Path | str,
        cpu: CpuTarget,
        allows: Callable[[Operator, Mapping[str, int]], bool] = lambda operator, config: True,
    ) -> None:
        self.directory = Path(directory)
        self._cpu = cpu
        self._allows = allows
        self._environments: dict[str, dict[str, str]] = {}
        self._records: dict[Operator, dict[ConfigKey, Record]] = {}
        self._best: dict[Operator, Record] = {}
        self._failures: dict[Operator, dict[ConfigKey, Failure]] = {}
        self._lock: FolderLock | None = None
        self._seen_bytes: tuple[int, ...] = ()
        self._target: Any = None
        self._workloads: dict[str, int] = {}
        self._workload_indices: dict[Operator, int] = {}
        if self.directory.exists() and not self.directory.is_dir():
            raise InputError(f"{self.directory}: tuning records need a directory, this is a file")
        self._read()

    def claim(self) -> None:
        """Lock out other writers before measurements, and read what they have written since this store was read.

        Raises ``OutputError`` that names the present writer.
        """
        self._open_for_writing()
        if self._seen_bytes != self._present_bytes():
            self._read()

    def best(self, operator: Operator) -> Record | None:
        """Fastest record; the winner of the last comparison takes precedence over all earlier measurements."""
        return self._best.get(operator)

    def all(self, operator: Operator) -> list[Record]:
        """Last record of every configuration, in the order of their first measurement."""
        return list(self._records.get(operator, {}).values())

    def near_best(self, operator: Operator, ratio: float, count: int) -> list[Mapping[str, int]]:
        """Up to ``count`` configurations: that of :meth:`best`, then the fastest others within ``ratio`` of it."""
        best = self.best(operator)
        if best is None:
            return []
        others = sorted((r for r in self.all(operator) if r.config != best.config), key=lambda r: r.seconds)
        near = [record.config for record in others if record.seconds <= ratio * best.seconds]
        return [best.config, *near[: count - 1]]

    def failures(self, operator: Operator) -> list[Failure]:
        """Failed configurations."""
        return list(self._failures.get(operator, {}).values())

    def operators(self) -> list[Operator]:
        """All operators with a record."""
        return list(self._records)

    def add(self, operator: Operator, config: Mapping[str, int], seconds: float) -> None:
        """Store a measurement."""
        self._append([Record(operator, dict(config), seconds)])

    def confirm(self, operator: Operator, results: Sequence[tuple[Mapping[str, int], float]]) -> None:
        """Store the results of a comparison of the best candidates; its fastest becomes :meth:`best`."""
        slowest_first = sorted(results, key=lambda result: -result[1])
        self._append([Record(operator, dict(config), seconds, confirmed=True) for config, seconds in slowest_first])

    def add_failure(self, operator: Operator, config: Mapping[str, int], error: str, message: str) -> None:
        """Store a failure, so that it is not tried again."""
        self._open_for_writing()
        failure = Failure(operator, dict(config), error, message)
        content = {
            "operator": to_record(operator),
            "config": failure.config,
            "error": error,
            "message": message,
            **self._environment(operator),
        }
        _append_lines(self.directory / FAILURES, [json.dumps(content)])
        self._failures.setdefault(operator, {})[config_key(config)] = failure

    def database(self) -> Any:
        """Open a ``tvm.s_tir.meta_schedule.database.JSONDatabase`` on the same files."""
        from tvm.s_tir.meta_schedule.database import JSONDatabase

        self._open_for_writing()
        return JSONDatabase(work_dir=str(self.directory))

    def close(self) -> None:
        """Release the lock for other writers."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> None:
        self._seen_bytes = self._present_bytes()
        self._records, self._best, self._failures = {}, {}, {}
        for entry in read_lines(self.directory / RECORDS, parse_line):
            if entry is not None and self._is_ours(*entry) and self._allows(entry[0].operator, entry[0].config):
                self._remember(entry[0])
        for failed in read_lines(self.directory / FAILURES, _parse_failure):
            if failed is not None and self._is_ours(*failed) and self._allows(failed[0].operator, failed[0].config):
                self._failures.setdefault(failed[0].operator, {})[config_key(failed[0].config)] = failed[0]

    def _present_bytes(self) -> tuple[int, ...]:
        """Sizes of the files read; lines are only ever appended to them."""
        paths = (self.directory / RECORDS, self.directory / FAILURES)
        return tuple(path.stat().st_size if path.is_file() else 0 for path in paths)

    def _environment(self, operator: Operator) -> dict[str, str]:
        dtype = operator.dtype
        if dtype not in self._environments:
            self._environments[dtype] = environment(self._cpu, dtype)
        return self._environments[dtype]

    def _is_ours(self, kept: Record | Failure, made: Mapping[str, str]) -> bool:
        return made == self._environment(kept.operator)

    def _remember(self, record: Record) -> None:
        self._records.setdefault(record.operator, {})[config_key(record.config)] = record
        best = self._best.get(record.operator)
        if best is None or record.confirmed or record.seconds < best.seconds:
            self._best[record.operator] = record

    def _append(self, records: Sequence[Record]) -> None:
        """Append all records in one write."""
        self._open_for_writing()
        if self._target is None:
            self._target = self._cpu.tvm_target()
        lines = [
            record_line(record, self._workload_index(record.operator), self._environment(record.operator), self._target)
            for record in records
        ]
        _append_lines(self.directory / RECORDS, lines)
        for record in records:
            self._remember(record)

    def _workload_index(self, operator: Operator) -> int:
        """Line number of the operator's workload, which is written if missing."""
        if operator not in self._workload_indices:
            line = workload_line(operator)
            if line not in self._workloads:
                _append_lines(self.directory / WORKLOADS, [line])
                self._workloads[line] = len(self._workloads)
            self._workload_indices[operator] = self._workloads[line]
        return self._workload_indices[operator]

    def _open_for_writing(self) -> None:
        if self._lock is not None:
            return
        self._lock = lock_folder(self.directory, "tuning records")
        for name in (WORKLOADS, RECORDS, FAILURES):
            _cut_unfinished_line(self.directory / name)
        compact = read_lines(self.directory / WORKLOADS, lambda line: json.dumps(decoded(line), separators=(",", ":")))
        self._workloads = {line: number for number, line in enumerate(compact)}


def _parse_failure(line: str) -> tuple[Failure, dict[str, str]] | None:
    content = decoded(line)
    try:
        operator = recorded_operator(content.pop("operator"))
        config = {str(knob): int(value) for knob, value in content.pop("config").items()}
        failure = Failure(operator, config, str(content.pop("error")), str(content.pop("message")))
    except MALFORMED:
        return None
    return failure, content


def read_lines(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    """Yield every parsed line. An unfinished last line is skipped; any other malformed line raises ``InputError``."""
    try:
        content = read_bytes(path, "table")
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check its path and permissions") from error
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    for number, line in enumerate(lines, 1):
        try:
            yield parse(line.decode())
        except ValueError as error:
            if number == len(lines):
                _log.warning("%s: the last line is unfinished (a killed run, or a full disk) and left out", path)
                return
            raise InputError(
                f"{path}: line {number} is not a tuning record ({error}); restore the file or remove it"
            ) from error


def _cut_unfinished_line(path: Path) -> None:
    """Remove an unfinished last line of ``path``, so that the next one can be appended."""
    if not path.exists():
        return
    try:
        check_file(path, "table")
        with open(path, "r+b") as file:
            content = file.read()
            start = content.removesuffix(b"\n").rfind(b"\n") + 1
            last = content[start:]
            if not last:
                return
            try:
                decoded(last.decode())
            except ValueError:
                file.truncate(start)
            else:
                if not last.endswith(b"\n"):
                    file.write(b"\n")
    except OSError as error:
        raise OutputError(
            f"{path}: tuning records cannot be written: {error.strerror}; choose another place, or free some"
        ) from error


def _append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append all the lines atomically; raise ``OutputError`` on failure."""
    data = "".join(f"{line}\n" for line in lines).encode()
    try:
        with open(path, "ab", buffering=0) as file:
            append_whole(file, data)
    except OSError as error:
        raise OutputError(
            f"{path}: tuning records cannot be written: {error.strerror}; choose another place, or free some"
        ) from error


_KEY = re.compile(r"([^/]+)/([^/]*)/l1=(\d+)/l2=(\d+)/threads=(\d+)")


def recorded_cpus(directory: Path) -> list[CpuTarget]:
    """CPUs in the order of their first record; foreign and unfinished lines are ignored."""
    try:
        lines = read_text(directory / RECORDS, "table").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    keys: dict[str, None] = {}
    for line in lines:
        try:
            entry = parse_line(line)
        except ValueError:
            continue
        if entry is not None:
            keys[entry[1]["cpu"]] = None
    return [cpu for key in keys if (cpu := _from_key(key)) is not None]


def _from_key(key: str) -> CpuTarget | None:
    """CPU with this :attr:`schedules.contract.cpu_target.CpuTarget.key`, or None."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    mcpu, features, l1, l2, threads = match.groups()
    cpu = target_with(frozenset(filter(None, features.split("+"))), int(threads), int(l1), int(l2), mcpu)
    return cpu if cpu.key == key else None
