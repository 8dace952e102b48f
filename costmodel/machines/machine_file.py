"""Machine files: found by path or name, read and written as strict YAML, variants included.

Every error is a :class:`MachineError` naming file and key. The keys are the fields of
:class:`costmodel.machines.machine_records.Machine` without their units; docs/extending.md explains them. A file is
found by its path, in the user's directory, or among those shipped with the package.

Variants say ``variant_of: h100-sxm`` and what differs; the rest follows from the machine named. Mappings are merged
key by key, lists (``memory``, ``links``) by ``name`` or ``kind``. What the file does not say:

``gpu.power``                  sustained rates by :mod:`costmodel.machines.power_law`
``gpu.sm_count``, ``clock``    rates and the bandwidth of L2 go with both
``compute.<dtype>.datasheet``  ``sustained`` and ``burst`` keep their shares of the datasheet, before the power limit;
                               of a dtype of the tensor cores, so do the others of which nothing is said
``memory[].datasheet``         the sustained bandwidth keeps its share of the datasheet
``memory[].capacity``          the usable bytes keep their share of the capacity

Capacities and latencies are those of the machine named. A variant that says nothing is that machine by another name.
"""

from __future__ import annotations

import difflib
import os
import platform
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from costmodel.base.errors import MachineError, OutputError
from costmodel.base.input_files import MALFORMED
from costmodel.base.output_files import user_folder, write_whole
from costmodel.base.process import usable_cores
from costmodel.base.units import format_quantity
from costmodel.machines.machine_records import NAME, ComputeRate, Host, Machine, MemoryLevel, PerThreads
from costmodel.machines.power_law import HELD_DRAW, clock_holds, share_at_limit, unthrottled_share
from costmodel.machines.record_file import convert_record, file_content, read_mapping

KEY = "variant_of"
# Dtypes of the tensor cores; if a file gives the rate of one, the others follow from the first given in this order.
_TENSOR = ("bfloat16", "float16", "tf32", "float8", "int8")


@dataclass(frozen=True)
class VariantFile:
    """Variant file: its own content (``own``), the content of the file of its base machine (``base``, read from
    ``path``), and both merged (``merged``).
    """

    name: str
    path: Path
    base: dict[str, Any]
    own: dict[str, Any]
    merged: dict[str, Any]


def variant_file(document: Mapping[str, Any], path: Path, packaged: Path) -> VariantFile | None:
    """``document`` of the file ``path`` merged with its base machine; ``None`` if it is no variant.

    The base file is in the same folder or in ``packaged``; :class:`MachineError` if it does not exist or is a variant
    too.
    """
    if KEY not in document:
        return None
    name = document[KEY]
    plain = isinstance(name, str) and re.fullmatch(NAME, name) is not None
    places = [folder / f"{name}.yaml" for folder in (path.parent, packaged)] if plain else []
    found = next((place for place in places if place.exists() and place != path), None)
    if found is None:
        raise MachineError(f"{path}: {KEY}: no machine file {name!r} beside it or in {packaged}; correct the name")
    base = read_mapping(found, MachineError, "not a machine file")
    if KEY in base:
        raise MachineError(f"{path}: {KEY}: {name} is a variant itself; name the machine that it is one of")
    own = {key: value for key, value in document.items() if key != KEY}
    try:
        return VariantFile(str(name), found, base, own, _merged(base, own))
    except MALFORMED as error:
        raise MachineError(f"{path}: not a variant of {name} ({error}); correct the value") from None


def with_scaled_rates(merged: Machine, base: Machine, file: VariantFile) -> Machine:
    """``merged`` with rates and bandwidths scaled from ``base`` where ``file`` omits them.

    ``ValueError`` for a power limit below the clock-independent power.
    """
    before, after = base.chip(), merged.chip()
    size = after.sm_count / before.sm_count * after.clock_hz / before.clock_hz
    limits, told = (before.power_watts, after.power_watts), file.own.get("compute", {})
    tensor = _tensor_scale(merged, base, told) or size
    compute = dict(merged.compute)
    for dtype, old in base.compute.items():
        best = unthrottled_share(dtype, before.lanes)
        scale = tensor if dtype in _TENSOR else size
        rate = _rate(merged.compute[dtype], old, told.get(dtype, {}), (size, scale), limits, best)
        if rate != merged.compute[dtype]:
            note = f"{rate.origin}; the rest from {file.name} by size, clock and power limit"
            compute[dtype] = replace(rate, origin=note)
    levels = {_name(each): each for each in file.own.get("memory", [])}
    known = {each.name: each for each in base.memory}
    memory = tuple(_level(each, known.get(each.name), size, levels.get(each.name, {})) for each in merged.memory)
    least = memory[-1].bandwidth.at(1)  # DRAM traffic passes through the cache
    memory = tuple(
        each if each.bandwidth.at(1) >= least else replace(each, bandwidth=memory[-1].bandwidth) for each in memory
    )
    return replace(merged, compute=compute, memory=memory, variant_of=base.name)


def _merged(base: Any, own: Any) -> Any:
    if isinstance(base, dict) and isinstance(own, dict):
        return {**base, **{key: _merged(base.get(key), value) for key, value in own.items()}}
    if isinstance(base, list) and isinstance(own, list):
        known = {_name(each): each for each in base}
        changed = {_name(each): _merged(known.get(_name(each)), each) for each in own}
        return [changed.pop(_name(each), each) for each in base] + list(changed.values())
    return own


def _name(item: Mapping[str, Any]) -> Any:
    return item.get("name", item.get("kind"))


def _tensor_scale(merged: Machine, base: Machine, told: Mapping[str, Any]) -> float | None:
    """Rate of the tensor cores relative to the base machine, from a datasheet rate in the file; ``None`` if not
    given.
    """
    for dtype in _TENSOR:
        if "datasheet" in told.get(dtype, {}) and dtype in base.compute:
            here, there = merged.compute[dtype].datasheet, base.compute[dtype].datasheet
            if here is not None and there is not None:
                return here / there
    return None


def _rate(
    rate: ComputeRate,
    old: ComputeRate,
    said: Mapping[str, Any],
    scales: tuple[float, float],
    limits: tuple[float, float],
    best: float,
) -> ComputeRate:
    """``rate`` with the values that the file omits (not in ``said``) scaled from ``old``, the base machine's rate.

    scales: multiprocessors times clock, and the rate of the dtype's units, relative to the base machine. limits: power
    limits of the base machine and of this one. best: :func:`unthrottled_share` of the dtype there.
    """
    size, scale = scales
    if "datasheet" in said and rate.datasheet is not None and old.datasheet is not None:
        scale = rate.datasheet / old.datasheet
    if not said and scale == 1.0 and limits[0] == limits[1]:
        return rate
    burst, share, spare = _burst(old, best)
    # A higher datasheet rate than multiprocessors and clock give implies a higher limit; a lower one fewer units, which
    # draw less power.
    units = min(1.0, scale / size)
    unmoved = limits[0] == limits[1] and size == units == 1.0
    share = share if unmoved else share_at_limit(share, *limits, size, units * spare)
    burst = rate.burst if "burst" in said and rate.burst is not None else burst * scale
    sustained = rate.sustained.at(1) if "sustained" in said else burst * share
    sinks = old.burst is not None or (spare < 1.0 and share < 1.0)
    return replace(
        rate,
        sustained=PerThreads(((1, sustained),)),
        burst=rate.burst if "burst" in said else max(burst, sustained) if sinks else None,
        datasheet=rate.datasheet if "datasheet" in said else None if old.datasheet is None else old.datasheet * scale,
    )


def _burst(rate: ComputeRate, best: float) -> tuple[float, float, float]:
    """Rate at the clock of a burst, the share of it that is sustained, and the power of a burst relative to the limit
    that is met at the sustained rate.
    """
    sustained = rate.sustained.at(1)
    if rate.burst is not None:
        return rate.burst, min(1.0, sustained / rate.burst), 1.0
    held = 1.0 if rate.datasheet is None else min(1.0, sustained / (rate.datasheet * best))
    return (sustained, 1.0, HELD_DRAW) if clock_holds(held) else (sustained / held, held, 1.0)


def _level(level: MemoryLevel, old: MemoryLevel | None, size: float, said: Mapping[str, Any]) -> MemoryLevel:
    """``level`` with its bandwidth scaled by its datasheet, or for a cache by the units that access it."""
    if old is None:
        return level
    if "capacity" in said and "usable" not in said and old.usable_bytes is not None:
        level = replace(level, usable_bytes=old.usable_bytes / old.capacity_bytes * level.capacity_bytes)
    if "bandwidth" in said:
        return level
    scale = size if old.datasheet is None else (level.datasheet or old.datasheet) / old.datasheet
    return level if scale == 1.0 else replace(level, bandwidth=PerThreads(((1, old.bandwidth.at(1) * scale),)))


def read_machine(path: Path) -> Machine:
    """Read the machine described by the YAML file ``path``, which may be a variant of another
    (:mod:`costmodel.machines.machine_file`); :class:`MachineError` names the file and the key.
    """
    document = read_mapping(
        path, MachineError, "not a machine file; it must be a mapping with name, kind, compute, memory ..."
    )
    variant = variant_file(document, path, Path(__file__).parent / "gpu")
    machine = convert_record(variant.merged if variant else document, Machine, path, MachineError)
    if variant:
        base = convert_record(variant.base, Machine, variant.path, MachineError)
        if base.gpu is None or machine.gpu is None:
            raise MachineError(f"{path}: variant_of: {variant.name} is no GPU; write the whole file instead")
        try:
            machine = with_scaled_rates(machine, base, variant)
        except ValueError as error:
            raise MachineError(f"{path}: not a variant of {variant.name} ({error}); correct the value") from None
    machine = replace(machine, source=str(path))
    problem = _problem(machine)
    if problem:
        raise MachineError(f"{path}: {problem}")
    return machine


def _problem(machine: Machine) -> str:
    """Description of an inconsistency in ``machine``; empty if there is none."""
    levels = [level.name for level in machine.memory]
    kinds = [link.kind for link in machine.links]
    if machine.kind == "cpu" and (machine.gpu is not None or machine.links):
        return "gpu, links: only for kind gpu; remove them"
    if machine.kind == "gpu" and levels != ["L2", "DRAM"]:
        return "memory: a GPU has the levels L2, DRAM, in this order"
    if any(level.usable_bytes is not None and level.usable_bytes > level.capacity_bytes for level in machine.memory):
        return "memory: usable is more than the capacity; correct one of them"
    if machine.kind == "gpu" and machine.gpu is None:
        return "gpu: missing; add it"
    if "network" in kinds:
        return f"links.{kinds.index('network')}.kind: a network has a file of its own; give 'pcie' or 'nvlink'"
    if len(set(kinds)) != len(kinds):
        return "links: two of the same kind; keep one"
    if len(set(levels)) != len(levels):
        return f"memory: two levels have the same name ({', '.join(levels)}); rename one"
    return next(_beyond_datasheet(machine), "")


def _beyond_datasheet(machine: Machine) -> Iterator[str]:
    """Descriptions of figures in a GPU's file that exceed its datasheet."""
    if machine.kind != "gpu":
        return
    most = machine.above_datasheet
    for dtype, rate in machine.compute.items():
        sustained, burst = rate.sustained.at(1), rate.short_load
        if rate.datasheet is not None and max(sustained, burst) > most * rate.datasheet:
            name = "sustained" if sustained > most * rate.datasheet else "burst"
            told = format_quantity(getattr(rate, name) if name == "burst" else sustained, "FLOP/s")
            least = format_quantity(rate.datasheet, "FLOP/s")
            yield f"compute.{dtype}.{name}: {told} is more than the datasheet's {least}; correct one of them"
        if sustained > burst:
            yield f"compute.{dtype}.burst: less than what is sustained; leave it out where the clock holds"
    for level in machine.memory:
        if level.datasheet is not None and level.bandwidth.at(1) > level.datasheet:
            yield f"memory.{level.name}.bandwidth: more than its datasheet says; correct one of them"
    for link in machine.links:
        if link.datasheet is not None and link.bandwidth > link.datasheet:
            yield f"links.{link.kind}.bandwidth: more than its datasheet says; correct one of them"


def write_machine(machine: Machine, path: Path, comment: str = "") -> None:
    """Write ``machine`` so that :func:`read_machine` restores it (to four digits); ``OutputError`` on failure."""
    header = "".join(f"# {line}\n" for line in comment.splitlines())
    text = header + yaml.safe_dump(machine_record(machine), sort_keys=False, width=120, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o FILE") from None


def machine_record(machine: Machine) -> dict[str, Any]:
    """Content of the machine file, quantities as text; the same record feeds YAML, ``--json`` and tables."""
    return file_content(machine)


PACKAGED_DIRECTORY = Path(__file__).parent
HOST_NAME = "host"
_SUFFIXES = (".yaml", ".yml")
_FEATURES = r"(avx|amx|sse4|asimd|sve).*|fma|f16c|fphp|i8mm|bf16|sme2?"


def user_directory() -> Path:
    """Folder of the user's machines: ``$COSTMODEL_MACHINES``, else ``$XDG_CONFIG_HOME/costmodel/machines``, else
    ``~/.config/costmodel/machines``.
    """
    override = os.environ.get("COSTMODEL_MACHINES")
    if override:
        return Path(override)
    return user_folder("config") / "machines"


def machine_files() -> dict[str, Path]:
    """Files of all machines known by name; the user's files override packaged ones of the same name."""
    packaged = [path for kind in ("cpu", "gpu") for path in sorted((PACKAGED_DIRECTORY / kind).glob("*.yaml"))]
    user = sorted(path for path in _listed(user_directory()) if path.suffix in _SUFFIXES)
    return {path.stem: path for path in [*packaged, *user]}


def driver_names() -> dict[str, str]:
    """Machine names by lower-case GPU name of the driver, for GPUs whose driver name does not identify the machine."""
    rows = yaml.safe_load((PACKAGED_DIRECTORY / "gpu_names.yaml").read_text(encoding="utf-8"))
    return {row["name"].lower(): row["machine"] for row in rows}


def load_machine(name_or_path: str | Path, kind: Literal["cpu", "gpu"] | None = None) -> Machine:
    """Load the machine of a file path, of a name in :func:`machine_files`, or of a unique prefix of one (``h200``).
    ``kind``: kind that the caller can use, for suggestions of names.

    Raises :class:`MachineError` for an unknown name (suggesting the nearest names) or a malformed file.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or os.sep in text or text.endswith(_SUFFIXES):
        return read_machine(Path(name_or_path))
    files = machine_files()
    if text in files:
        return read_machine(files[text])
    longer = longer_names(text, files)
    if len(longer) == 1:
        return read_machine(files[longer[0]])
    if longer:
        raise MachineError(f"machine {text!r} may be {', '.join(longer)}; name one of them")
    if text == HOST_NAME:
        raise MachineError("machine 'host' is not calibrated yet: run `python -m costmodel calibrate`")
    other = {"cpu": "gpu", "gpu": "cpu"}.get(kind or "")
    usable = sorted(name for name, path in files.items() if path.parent != PACKAGED_DIRECTORY / str(other))
    raise MachineError(f"unknown machine {text!r}; {offered(text, usable)}`python -m costmodel machines` lists all")


def offered(text: str, names: Iterable[str]) -> str:
    """The nearest of ``names`` as a question; empty if none is near."""
    near = difflib.get_close_matches(text.lower(), list(names), n=3)
    return f"did you mean {', '.join(near)}? " if near else ""


def longer_names(text: str, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that continue ``text`` with a hyphen, such as ``h100-sxm`` for ``h100``, but do not continue
    another of them.
    """
    found = sorted(name for name in names if name.startswith(f"{text}-"))
    return [name for name in found if not any(name.startswith(f"{other}-") for other in found)]


def host_machine(threads: int | None = None) -> Machine | None:
    """Machine that `calibrate` measured on this CPU, or ``None``.

    A file measured on another CPU, or on fewer threads than ``threads`` (default: the cores this process may use), is
    ignored with a ``UserWarning``.
    """
    path = machine_files().get(HOST_NAME)
    if path is None:
        return None
    machine = read_machine(path)
    reason = _stale(machine, host_identity(), threads)
    if reason is None:
        return machine
    warnings.warn(f"{path}: {reason}; run `python -m costmodel calibrate`", stacklevel=2)
    return None


def host_identity() -> Host:
    """Architecture, instruction-set features and usable cores of the CPU this process runs on."""
    return Host(platform.machine(), cpu_features(), usable_threads())


def usable_threads() -> int:
    """Number of cores this process may use."""
    return usable_cores()


def cpu_features() -> tuple[str, ...]:
    """Vector and matrix features reported by the kernel (x86 ``flags``, ARM ``Features``); empty if unavailable."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ()
    return features_of(text)


def features_of(cpuinfo: str) -> tuple[str, ...]:
    """Vector and matrix features in the text of /proc/cpuinfo."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    flags = match.group(1).split() if match else []
    return tuple(sorted(flag for flag in flags if re.fullmatch(_FEATURES, flag)))


def _stale(machine: Machine, host: Host, threads: int | None) -> str | None:
    measured = machine.host
    if measured is None:
        return "does not say on which CPU it was measured"
    if (measured.architecture, set(measured.features)) != (host.architecture, set(host.features)):
        return "was measured on another CPU"
    wanted = threads or host.threads
    if machine.max_threads < wanted:
        return f"was measured on {machine.max_threads} threads only, {wanted} wanted"
    return None


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir()) if directory.is_dir() else []
    except OSError as error:
        raise MachineError(
            f"{directory}: cannot be listed ({error.strerror}); check its path and permissions"
        ) from None
