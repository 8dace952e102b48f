"""Machine files of variants: ``variant_of: h100-sxm`` and what differs; the rest follows from the machine named.

Mappings are merged key by key, lists (``memory``, ``links``) by ``name`` or ``kind``. What the file does not say:

``gpu.power``                 sustained rates with a ``burst`` by :func:`costmodel.machines.power_law.share_at_limit`
``memory[].datasheet``        the sustained bandwidth keeps its share of the datasheet
``memory[].capacity``         the usable bytes keep their share of the capacity
``gpu.sm_count``, ``clock``   rates go with both
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from costmodel.base.errors import MachineError
from costmodel.base.plain_json import MALFORMED
from costmodel.base.units import format_quantity, parse_quantity
from costmodel.machines.power_law import share_at_limit
from costmodel.machines.record_file import read_mapping

KEY = "variant_of"
_SCALED = ("sustained", "burst", "datasheet")


def whole_document(document: Mapping[str, Any], path: Path, packaged: Path) -> dict[str, Any]:
    """``document`` of the file ``path`` with everything that the machine it is a variant of says; itself if of none.

    The other file lies beside it or in ``packaged``; :class:`MachineError` if there is none, or it is a variant too.
    """
    if KEY not in document:
        return dict(document)
    name = document[KEY]
    plain = isinstance(name, str) and re.fullmatch(r"[\w.+-]{1,100}", name) is not None
    places = [folder / f"{name}.yaml" for folder in (path.parent, packaged)] if plain else []
    found = next((place for place in places if place.exists() and place != path), None)
    if found is None:
        raise MachineError(f"{path}: {KEY}: no machine file {name!r} beside it or in {packaged}; correct the name")
    base = read_mapping(found, MachineError, "not a machine file")
    if KEY in base:
        raise MachineError(f"{path}: {KEY}: {name} is a variant itself; name the machine that it is one of")
    own = {key: value for key, value in document.items() if key != KEY}
    try:
        merged: dict[str, Any] = _merged(base, own)
        _scale_rates(merged, base, own, str(name))
        _scale_memory(merged, base, own)
    except MALFORMED as error:
        raise MachineError(f"{path}: not a variant of {name} ({error}); correct the value") from None
    return merged


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


def _scale_rates(merged: dict[str, Any], base: Mapping[str, Any], own: Mapping[str, Any], name: str) -> None:
    """Rates that ``own`` leaves open, by multiprocessors, clock and power limit."""
    before, after = base["gpu"], merged["gpu"]
    size = after["sm_count"] / before["sm_count"]
    size *= parse_quantity(after["clock"], "Hz") / parse_quantity(before["clock"], "Hz")
    limits = [parse_quantity(each["power"], "W") for each in (before, after)]
    # A limit is shared by the multiprocessors that there are, at the clock that there is.
    limits[1] /= size
    for dtype, rate in base["compute"].items():
        said = own.get("compute", {}).get(dtype, {})
        numbers = {key: parse_quantity(rate[key], "FLOP/s") * size for key in _SCALED if key in rate}
        if "burst" in numbers:
            share = share_at_limit(numbers["sustained"] / numbers["burst"], limits[0], limits[1])
            burst = parse_quantity(said["burst"], "FLOP/s") if "burst" in said else numbers["burst"]
            numbers["sustained"] = burst * share
        scaled = {key: format_quantity(value, "FLOP/s") for key, value in numbers.items() if key not in said}
        note = f"{said.get('origin', rate.get('origin', ''))}; the rest from {name} by size, clock and power limit"
        merged["compute"][dtype] = {**merged["compute"][dtype], **scaled, **said, "origin": note}


def _scale_memory(merged: dict[str, Any], base: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    said = {_name(each): each for each in own.get("memory", [])}
    for level, before in zip(merged["memory"], base["memory"], strict=True):
        mine = said.get(_name(level), {})
        if "capacity" in mine and "usable" not in mine and "usable" in before:
            share = parse_quantity(before["usable"], "B") / parse_quantity(before["capacity"], "B")
            level["usable"] = format_quantity(parse_quantity(mine["capacity"], "B") * share, "B")
        if "datasheet" in mine and "bandwidth" not in mine and "datasheet" in before:
            share = parse_quantity(before["bandwidth"], "B/s") / parse_quantity(before["datasheet"], "B/s")
            level["bandwidth"] = format_quantity(parse_quantity(mine["datasheet"], "B/s") * share, "B/s")
