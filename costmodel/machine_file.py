"""Machine files: strict YAML in, strict YAML out. Every mistake is a :class:`MachineError` naming file and key.

name: toy                       # identification
kind: cpu                       # cpu | gpu
description: ...
compute:                        # per dtype
  float32:
    sustained: {1: 100 FLOP/s, 2: 200 FLOP/s}     # per thread count, from 1; or one quantity (a GPU)
    datasheet: 250 FLOP/s                         # optional, the whole device
    origin: where the number is from
memory:                         # from the core outwards
  - name: L1
    capacity: 32 KiB            # of one core, or of all when shared
    shared: false
    bandwidth: {1: 80 B/s, 2: 160 B/s}            # all threads together, reads
    write_bandwidth: ...                          # optional
    latency: 670 ns                               # optional, one load at a random place
    origin: ...
parallel_region:
  seconds: {1: 0 s, 2: 1.2 us}
  origin: ...
vector: {bits: 512, registers: 32, features: [avx512f], origin: ...}        # optional
host: {architecture: x86_64, features: [avx512f], threads: 2}               # optional, written by calibrate
gpu:                            # required for kind gpu, refused elsewhere; sizes are those of one SM
  architecture: volta
  sm_count: 80
  lanes: 64
  clock: 1380 MHz
  max_threads: 2048
  registers: 256 KiB
  shared_memory: 96 KiB
  power: 250 W
  origin: ...
links:                          # optional; one direction, one GPU
  - {kind: pcie, bandwidth: 12.3 GB/s, datasheet: 15.75 GB/s, latency: 2 us, origin: ...}
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from costmodel.errors import MachineError, OutputError, ProjectError
from costmodel.machine_records import (
    ComputeRate,
    GpuChip,
    Host,
    Link,
    Machine,
    MemoryLevel,
    ParallelRegion,
    PerThreads,
    VectorUnit,
)
from costmodel.operators import DTYPE_BYTES
from costmodel.units import format_quantity, parse_quantity
from costmodel.whole_file import write_whole


def quantity(unit: str, positive: bool = True) -> Any:
    def parse(value: object) -> float:
        number = parse_quantity(value, unit)
        if positive and number <= 0:
            raise ValueError(f"{value!r} must be above zero")
        return number

    return Annotated[float, BeforeValidator(parse)]


def _per_threads(unit: str, positive: bool = True) -> Any:
    parse = quantity(unit, positive).__metadata__[0].func

    def read(value: object) -> PerThreads:
        if not isinstance(value, dict):
            return PerThreads(((1, parse(value)),))
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in value):
            raise ValueError(f"keys must be thread counts (integers), got {list(value)}")
        return PerThreads(tuple((count, parse(each)) for count, each in sorted(value.items())))

    return Annotated[PerThreads, BeforeValidator(read)]


def _dtype(name: str) -> str:
    if name not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {name!r}, known: {', '.join(DTYPE_BYTES)}")
    return name


Text = Annotated[str, Field(min_length=1)]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class _Compute(StrictModel):
    sustained: _per_threads("FLOP/s")  # type: ignore[valid-type]
    datasheet: quantity("FLOP/s") | None = None  # type: ignore[valid-type]
    origin: Text


class _Level(StrictModel):
    name: Text
    capacity: quantity("B")  # type: ignore[valid-type]
    shared: bool
    bandwidth: _per_threads("B/s")  # type: ignore[valid-type]
    write_bandwidth: _per_threads("B/s") | None = None  # type: ignore[valid-type]
    datasheet: quantity("B/s") | None = None  # type: ignore[valid-type]
    latency: quantity("s") | None = None  # type: ignore[valid-type]
    origin: Text


class _Region(StrictModel):
    seconds: _per_threads("s", positive=False)  # type: ignore[valid-type]
    origin: Text


class _Vector(StrictModel):
    bits: Annotated[int, Field(ge=32, multiple_of=8)]
    registers: Annotated[int, Field(ge=1)]
    features: list[str]
    origin: Text


class _Host(StrictModel):
    architecture: Text
    features: list[str]
    threads: Annotated[int, Field(ge=1)]


class _Gpu(StrictModel):
    architecture: Text
    sm_count: Annotated[int, Field(ge=1)]
    lanes: Annotated[int, Field(ge=1)]
    clock: quantity("Hz")  # type: ignore[valid-type]
    max_threads: Annotated[int, Field(ge=32)]
    registers: quantity("B")  # type: ignore[valid-type]
    shared_memory: quantity("B")  # type: ignore[valid-type]
    power: quantity("W")  # type: ignore[valid-type]
    origin: Text


class _Link(StrictModel):
    kind: Literal["pcie", "nvlink"]
    bandwidth: quantity("B/s")  # type: ignore[valid-type]
    datasheet: quantity("B/s") | None = None  # type: ignore[valid-type]
    latency: quantity("s")  # type: ignore[valid-type]
    origin: Text


class _File(StrictModel):
    name: Text
    kind: Literal["cpu", "gpu"]
    description: Text
    compute: Annotated[dict[Annotated[str, BeforeValidator(_dtype)], _Compute], Field(min_length=1)]
    memory: Annotated[list[_Level], Field(min_length=1)]
    parallel_region: _Region
    vector: _Vector | None = None
    host: _Host | None = None
    gpu: _Gpu | None = None
    links: list[_Link] = []

    @model_validator(mode="after")
    def _gpus_are_described(self) -> _File:
        if self.kind == "cpu" and (self.gpu is not None or self.links):
            raise ValueError("gpu, links: only for kind gpu; remove them")
        if self.kind == "gpu" and [level.name for level in self.memory] != ["L2", "DRAM"]:
            raise ValueError("memory: a GPU has the levels L2, DRAM, in this order")
        if self.kind == "gpu" and self.gpu is None:
            raise ValueError("gpu: missing; add it")
        kinds = [link.kind for link in self.links]
        if len(set(kinds)) != len(kinds):
            raise ValueError("links: two of the same kind; keep one")
        return self


def read_mapping(path: Path, failure: type[ProjectError], otherwise: str) -> dict[str, Any]:
    """The mapping in the YAML file ``path``; ``failure`` names the file where it cannot be read, is no YAML, repeats a
    key, or holds no mapping (then ``otherwise`` says what is expected).
    """
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise failure(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise failure(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(document, dict):
        raise failure(f"{path}: {otherwise}")
    return document


def read_machine(path: Path) -> Machine:
    """The machine described by the YAML file ``path``; :class:`MachineError` names the file and the key."""
    document = read_mapping(
        path, MachineError, "not a machine file; it must be a mapping with name, kind, compute, memory ..."
    )
    try:
        machine = _to_machine(_File.model_validate(document), str(path))
    except ValidationError as error:
        raise MachineError(f"{path}: {explain(error)}") from None
    names = [level.name for level in machine.memory]
    if len(set(names)) != len(names):
        raise MachineError(f"{path}: memory: two levels have the same name ({', '.join(names)}); rename one")
    return machine


def write_machine(machine: Machine, path: Path, comment: str = "") -> None:
    """Writes ``machine`` so that :func:`read_machine` gives it back (four digits); ``OutputError`` if it cannot."""
    header = "".join(f"# {line}\n" for line in comment.splitlines())
    text = header + yaml.safe_dump(machine_record(machine), sort_keys=False, width=120, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o FILE") from None


def check_writable(path: Path) -> None:
    """:class:`OutputError` now rather than after a minute of measuring; makes the directory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o FILE") from None


def machine_record(machine: Machine) -> dict[str, Any]:
    """The content of the machine file, quantities as text; the same record feeds YAML, ``--json`` and tables."""
    record: dict[str, Any] = {
        "name": machine.name,
        "kind": machine.kind,
        "description": machine.description,
        "compute": {
            dtype: {
                "sustained": _record(rate.sustained, "FLOP/s"),
                **({} if rate.datasheet is None else {"datasheet": format_quantity(rate.datasheet, "FLOP/s")}),
                "origin": rate.origin,
            }
            for dtype, rate in machine.compute.items()
        },
        "memory": [_level_record(level) for level in machine.memory],
        "parallel_region": {
            "seconds": _record(machine.parallel_region.seconds, "s"),
            "origin": machine.parallel_region.origin,
        },
    }
    if machine.vector is not None:
        vector = machine.vector
        record["vector"] = {
            "bits": vector.bits,
            "registers": vector.registers,
            "features": list(vector.features),
            "origin": vector.origin,
        }
    if machine.host is not None:
        host = machine.host
        record["host"] = {
            "architecture": host.architecture,
            "features": list(host.features),
            "threads": host.threads,
        }
    if machine.gpu is not None:
        record["gpu"] = _gpu_record(machine.gpu)
    if machine.links:
        record["links"] = [_link_record(link) for link in machine.links]
    return record


def _gpu_record(gpu: GpuChip) -> dict[str, Any]:
    return {
        "architecture": gpu.architecture,
        "sm_count": gpu.sm_count,
        "lanes": gpu.lanes,
        "clock": format_quantity(gpu.clock_hz, "Hz"),
        "max_threads": gpu.max_threads,
        "registers": format_quantity(gpu.registers_bytes, "B"),
        "shared_memory": format_quantity(gpu.shared_memory_bytes, "B"),
        "power": format_quantity(gpu.power_watts, "W"),
        "origin": gpu.origin,
    }


def _link_record(link: Link) -> dict[str, Any]:
    return {
        "kind": link.kind,
        "bandwidth": format_quantity(link.bandwidth, "B/s"),
        **({} if link.datasheet is None else {"datasheet": format_quantity(link.datasheet, "B/s")}),
        "latency": format_quantity(link.latency_seconds, "s"),
        "origin": link.origin,
    }


def _level_record(level: MemoryLevel) -> dict[str, Any]:
    write = {} if level.write_bandwidth is None else {"write_bandwidth": _record(level.write_bandwidth, "B/s")}
    return {
        "name": level.name,
        "capacity": format_quantity(level.capacity_bytes, "B"),
        "shared": level.shared,
        "bandwidth": _record(level.bandwidth, "B/s"),
        **write,
        **({} if level.datasheet is None else {"datasheet": format_quantity(level.datasheet, "B/s")}),
        **({} if level.latency_seconds is None else {"latency": format_quantity(level.latency_seconds, "s")}),
        "origin": level.origin,
    }


def _record(values: PerThreads, unit: str) -> dict[int, str]:
    return {threads: format_quantity(value, unit) for threads, value in values.points}


def _to_machine(file: _File, source: str) -> Machine:
    return Machine(
        name=file.name,
        kind=file.kind,
        description=file.description,
        compute={name: ComputeRate(rate.sustained, rate.origin, rate.datasheet) for name, rate in file.compute.items()},
        memory=tuple(_to_level(level) for level in file.memory),
        parallel_region=ParallelRegion(file.parallel_region.seconds, file.parallel_region.origin),
        vector=None
        if file.vector is None
        else VectorUnit(file.vector.bits, file.vector.registers, tuple(file.vector.features), file.vector.origin),
        host=None if file.host is None else Host(file.host.architecture, tuple(file.host.features), file.host.threads),
        source=source,
        gpu=None if file.gpu is None else _to_gpu(file.gpu),
        links=tuple(Link(each.kind, each.bandwidth, each.latency, each.origin, each.datasheet) for each in file.links),
    )


def _to_level(level: _Level) -> MemoryLevel:
    return MemoryLevel(
        level.name,
        level.capacity,
        level.shared,
        level.bandwidth,
        level.origin,
        level.write_bandwidth,
        level.datasheet,
        level.latency,
    )


def _to_gpu(gpu: _Gpu) -> GpuChip:
    return GpuChip(
        architecture=gpu.architecture,
        sm_count=gpu.sm_count,
        lanes=gpu.lanes,
        clock_hz=gpu.clock,
        max_threads=gpu.max_threads,
        registers_bytes=gpu.registers,
        shared_memory_bytes=gpu.shared_memory,
        power_watts=gpu.power,
        origin=gpu.origin,
    )


def explain(error: ValidationError) -> str:
    """The first problem in words: key, what is wrong, what to do."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    rest = f" (and {error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f"{key}: unknown key; remove it or correct its spelling{rest}"
    if problem["type"] == "missing":
        return f"{key}: missing; add it{rest}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{key}: {message}{rest}" if key else f"{message}{rest}"


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error: silently dropping a number would price with the wrong one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, key in enumerate(keys):
            if key in keys[:index]:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)
