"""Readers of public sweeps of collectives. Seconds; sizes as :class:`CollectiveTransfer` counts them.

``aiconfigurator/<system>/comm/nccl/<version>/nccl_perf.parquet`` (ai-dynamo/aiconfigurator, Apache-2.0): nccl-tests,
out of place, milliseconds, ``message_size`` in elements of the larger buffer. All-reduce of ``int8`` rows is left out:
the switches of Hopper do not add bytes, so that it runs another algorithm than the types of training do. The column
``version``, where there is one, is taken before the folder's name, which contradicts it.

``vtrain/all_reduce/<gpu>/AR_GPU<n>*`` (VIA-Research/vTrain, MIT): nccl-tests, out of place (in-place beside it), ns.

``vidur/h100_dgx/send_recv.csv.gz`` (microsoft/vidur, MIT): kernels under a profiler, milliseconds, bytes; median of the
repetitions. Its all-reduces hold waiting for the other ranks up to 1 MB and are left out for H100, counted from 2 MB on
for pairs of A100. ``a100_pairwise_nvlink/send_recv`` is left out: 350 GB/s is more than NVLink bridges have.

``aiconfigurator/<system>/comm/<engine>/<version>/custom_allreduce_perf.parquet``: all-reduces as a serving engine runs
them, which hands large messages to NCCL; milliseconds, ``message_size`` in elements of 16 bits. Rows in CUDA graphs are
read; a row that takes longer than a larger message of its sweep was disturbed (38 us for 1 KiB among 8 H100, between 3
and 4) and is left out.
"""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from costmodel.collectives.calibration import DIRECTORY as MEASURED
from costmodel.collectives.sweep_logs import KINDS, CollectiveRow, SweepReader, read_own_table, read_sweep, whole_buffer
from costmodel.operators.collective_transfer import CollectiveTransfer
from lab.data.data_folder import Wanted, everything
from lab.data.kernel_table import read_parquet

_SYSTEMS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "l40s": "l40s", "a100_sxm": "a100-sxm-80gb"}
_VTRAIN = {"a100": "a100-sxm-80gb", "v100": "v100-sxm2-32gb"}
_VIDUR = {"h100_dgx/send_recv": "h100-sxm", "a100_pairwise_nvlink/all_reduce": "a100-pairwise"}
_ELEMENT_BYTES = {"half": 2, "bfloat16": 2, "float": 4, "int8": 1}
_NOT_ADDED_BY_SWITCHES = "int8"
_WAITING_BYTES = 2e6  # below this, vidur's all-reduces include waiting


@dataclass(frozen=True)
class CollectiveTable:
    """Rows of one file, measured on ``machine`` (name of a GPU or a cluster). ``source``: the file."""

    machine: str
    rows: tuple[CollectiveRow, ...]
    source: str


def sweep_files(data: Path) -> list[Path]:
    """All public sweeps of collectives under ``data``."""
    return [path for path, _, _ in _sweeps(data)]


def read_collectives(data: Path, wanted: Wanted = everything) -> list[CollectiveTable]:
    """Read the wanted ones of :func:`sweep_files`, and our own sweeps; empty if ``data`` has none.

    ``InputError`` if one is malformed.
    """
    public = [
        CollectiveTable(machine, tuple(read_sweep(read, path)), str(path))
        for path, machine, read in _sweeps(data)
        if wanted(path)
    ]
    return [*public, *_own(MEASURED)] if public else []


ENGINES = ("vllm", "sglang", "trtllm")
_DISTURBED = 1.15  # times the least time of a larger message


def engine_sweep_files(data: Path) -> list[Path]:
    """All tables of serving engines' own all-reduces under ``data``."""
    name = "custom_allreduce_perf.parquet"
    folders = [data / "aiconfigurator" / system / "comm" / engine for system in _SYSTEMS for engine in ENGINES]
    return [path for folder in folders for path in sorted(folder.glob(f"*/{name}"))]


def read_engine_reduces(data: Path, wanted: Wanted = everything) -> list[CollectiveTable]:
    """Read the wanted ones of :func:`engine_sweep_files`; ``InputError`` if one is malformed."""
    found = []
    for path in engine_sweep_files(data):
        if wanted(path):
            rows = sorted(_engine_rows(path), key=lambda row: (row.transfer.ranks, row.transfer.size_bytes))
            kept = tuple(row for place, row in enumerate(rows) if not _is_disturbed(row, rows[place + 1 :]))
            found.append(CollectiveTable(_SYSTEMS[path.relative_to(data).parts[1]], kept, str(path)))
    return found


def _engine_rows(path: Path) -> Iterator[CollectiveRow]:
    engine = path.parent.parent.name
    for row in read_parquet(path, "a table of all-reduces").to_pylist():
        if "eager" not in row["kernel_source"]:
            size = row["message_size"] * _ELEMENT_BYTES[row["allreduce_dtype"]]
            yield CollectiveRow(
                CollectiveTransfer("all_reduce", size, row["num_gpus"], engine=engine), row["latency"] * 1e-3
            )


def _is_disturbed(row: CollectiveRow, larger: Iterable[CollectiveRow]) -> bool:
    longer = [each.seconds for each in larger if each.transfer.ranks == row.transfer.ranks]
    return bool(longer) and row.seconds > _DISTURBED * min(longer)


def _own(directory: Path) -> Iterator[CollectiveTable]:
    for path in sorted(directory.glob("*/measured/collectives*.csv.gz")):
        yield CollectiveTable(path.parent.parent.name, tuple(read_own_table(path)), str(path))


def _sweeps(data: Path) -> Iterator[tuple[Path, str, SweepReader]]:
    """Yield each file with its machine and its reader."""
    for system, machine in _SYSTEMS.items():
        for path in sorted((data / "aiconfigurator" / system / "comm" / "nccl").glob("*/nccl_perf.parquet")):
            yield path, machine, _nccl_perf
    for folder, machine in _VTRAIN.items():
        for path in sorted((data / "vtrain" / "all_reduce" / folder).glob("AR_GPU*")):
            yield path, machine, _lookup_table
    for name, machine in _VIDUR.items():
        path = data / "vidur" / f"{name}.csv.gz"
        if path.exists():
            yield path, machine, _profiled


def _nccl_perf(path: Path) -> Iterator[CollectiveRow]:
    for row in read_parquet(path, "a sweep of collectives").to_pylist():
        kind = KINDS[row["op_name"]]
        if kind == "all_reduce" and row["nccl_dtype"] == _NOT_ADDED_BY_SWITCHES:
            continue
        size = row["message_size"] * _ELEMENT_BYTES[row["nccl_dtype"]]
        version = row.get("version") or path.parent.name
        yield CollectiveRow(whole_buffer(kind, size, row["num_gpus"]), row["latency"] * 1e-3, version)


def _lookup_table(path: Path) -> Iterator[CollectiveRow]:
    ranks = int(path.name.split("_")[1].removeprefix("GPU"))
    with path.open(encoding="utf-8", newline="") as stream:
        for row in list(csv.reader(stream))[1:]:
            yield CollectiveRow(CollectiveTransfer("all_reduce", float(row[0]), ranks), float(row[3]) * 1e-9)


def _profiled(path: Path) -> Iterator[CollectiveRow]:
    kind = KINDS[path.name.removesuffix(".csv.gz")]
    times: dict[CollectiveTransfer, list[float]] = defaultdict(list)
    with gzip.open(path, "rt", newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            ranks, size = int(row["num_workers"]), float(row["size"])
            if kind == "send_recv" or size >= _WAITING_BYTES:
                transfer = CollectiveTransfer(kind, size, ranks, ranks // int(row["devices_per_node"]))
                times[transfer].append(float(row[f"time_stats.{kind}.median"]))
    for transfer, values in times.items():
        yield CollectiveRow(transfer, sorted(values)[len(values) // 2] * 1e-3)
