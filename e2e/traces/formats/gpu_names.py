"""Lookup of a GPU's machine file by the driver's name for it, as in profiles."""

from __future__ import annotations

import re

from costmodel.base.errors import InputError
from costmodel.machines.machine_catalog import driver_names, load_machine, machine_files
from costmodel.machines.machine_records import Machine

# Equivalent form factors in drivers' names and in ours: SXM2, SXM4, SXM5 are one; HBM3 is only sold as SXM.
_SAME = ((re.compile(r"^sxm\d*$|^hbm3e?$"), "sxm"), (re.compile(r"^(\d+)gb$"), r"\1gb"))

_MEMORY = re.compile(r"^\d+gb$")
# Words that denote another card: other multiprocessors, clocks or memory.
_OTHER_CARD = frozenset({"ti", "super", "d", "laptop", "mobile", "max", "q", "nvl"})


def machine_of_gpu(name: str) -> Machine | None:
    """Return the machine for ``name`` ("Tesla V100-SXM2-32GB", or a part number), ``None`` if none or several fit."""
    known = driver_names().get(name.lower())
    if known is not None:
        return load_machine(known)
    words = _words(name)
    fitting: list[tuple[int, str]] = []
    for stem in machine_files():
        tokens = _words(stem)
        if tokens <= words and words & _OTHER_CARD <= tokens:
            fitting.append((len(tokens), stem))
    if not fitting:
        # A name without form factor ("NVIDIA H200") suffices if only one card of this chip is known; a name with an
        # unknown form factor, if all cards of the chip with its memory are of one kind.
        cards = [stem for stem in machine_files() if re.split(r"[-_ ]+", stem)[0] in words]
        told = {word for word in words if _MEMORY.match(word)}
        cards = [stem for stem in cards if told <= _words(stem)] or cards
        cards = [stem for stem in cards if not any(stem.startswith(f"{other}-") for other in cards)]  # variants
        if "dgxs" in words:  # DGX Stations: cards with NVLink at the rates of modules
            cards = [stem for stem in cards if "sxm" in _words(stem)]
        if len(cards) != 1:
            return None
        fitting = [(1, cards[0])]
    machine = load_machine(max(fitting)[1])
    return machine if machine.kind == "gpu" else None


def recorded_machine(name: str, source: str) -> Machine:
    """Return :func:`machine_of_gpu`; if there is none, raise ``InputError`` that asks for ``--gpu``."""
    machine = machine_of_gpu(name)
    if machine is None:
        raise InputError(f"{source}: recorded on {name or 'an unknown GPU'}, which no machine file fits; give --gpu")
    return machine


def _words(text: str) -> frozenset[str]:
    words = set()
    for word in re.split(r"[-_ ]+", text.lower()):
        for pattern, same in _SAME:
            word = pattern.sub(same, word)
        words.add(word)
    return frozenset(words - {""})
