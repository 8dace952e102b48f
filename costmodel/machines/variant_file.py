"""Machine files of variants: ``variant_of: h100-sxm`` and what differs; the rest follows from the machine named.

Mappings are merged key by key, lists (``memory``, ``links``) by ``name`` or ``kind``. What the file does not say:

``gpu.power``                  sustained rates by :mod:`costmodel.machines.power_law`
``gpu.sm_count``, ``clock``    rates and the bandwidth of L2 go with both
``compute.<dtype>.datasheet``  ``sustained`` and ``burst`` keep their shares of the datasheet, before the power limit;
                               of a dtype of the tensor cores, so do the others of which nothing is said
``memory[].datasheet``         the sustained bandwidth keeps its share of the datasheet
``memory[].capacity``          the usable bytes keep their share of the capacity

Capacities and latencies are those of the machine named. A variant that says nothing is that machine by another name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from costmodel.base.errors import MachineError
from costmodel.base.plain_json import MALFORMED
from costmodel.machines.file_fields import NAME
from costmodel.machines.machine_records import ComputeRate, Machine, MemoryLevel, PerThreads
from costmodel.machines.power_law import HELD_DRAW, clock_holds, share_at_limit, unthrottled_share
from costmodel.machines.record_file import read_mapping

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


def with_what_follows(merged: Machine, base: Machine, file: VariantFile) -> Machine:
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
