"""Serving engines: scheduler, token budget, kernels and host times, by version (``engines.yaml``)."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from costmodel.base.errors import InputError
from costmodel.base.units import parse_quantity
from costmodel.machines.record_file import read_mapping
from costmodel.operators.attention import AttentionKernel
from costmodel.operators.experts import ExpertKernel

# ``mixed``: prompts are cut to fill the token budget of a step beside single tokens; ``prefill-first``: a batch of
# prompts runs alone before decoding goes on; ``whole-prompts``: whole prompts join the step of single tokens.
Schedule = Literal["mixed", "prefill-first", "whole-prompts"]
# Which waiting sequences start: ``prompt``: those whose prompts the cache has room for; ``estimate``: those for which
# the running ones leave room by an estimate of their outputs; ``no-evict``: those that can reach their ends. With the
# first two, sequences are preempted when the cache is full.
Admission = Literal["prompt", "estimate", "no-evict"]
FILE = Path(__file__).with_name("engines.yaml")
_SECONDS = ("server", "step", "sequence", "launch")


@dataclass(frozen=True)
class Engine:
    """One serving engine in one version."""

    name: str
    title: str
    schedule: Schedule
    admission: Admission
    # Most tokens of one step.
    token_budget: int
    # Most sequences that run at once.
    sequences: int
    # Most sequences of a step that is launched as a CUDA graph.
    graph_sequences: int
    # Share of the GPU's memory that weights, activations and cache may take.
    memory_share: float
    # Tokens of a block of the cache.
    block: int
    attention: AttentionKernel
    experts: ExpertKernel
    all_reduce: str
    # Casts to 8 bits are part of the kernel before; all-reduce, residual and norm are one kernel.
    fuses_casts: bool
    fuses_norms: bool
    # Seconds of the server before the first token (HTTP, tokeniser, queues between processes); of the host per step;
    # per sequence of a step; per kernel that is launched without a graph.
    server: float
    step: float
    sequence: float
    launch: float
    version: str = ""
    # Tokens of a step beside one prompt and one for each user, where a recipe sets the budget so; 0: ``token_budget``.
    beside_prompt: int = 0
    # Factors by which the mean TPOT and TTFT of measured runs differ from what their kernels say, in 80 % of cases.
    band_tpot: float = 1.12
    band_ttft: float = 1.65


@lru_cache(maxsize=1)
def _known() -> dict[str, dict[str, Any]]:
    return read_mapping(FILE, InputError, "must be a mapping of engines")


def engine_named(text: str) -> Engine:
    """The engine of ``NAME`` or ``NAME=VERSION``; ``InputError`` for an unknown name."""
    name, equals, version = text.partition("=")
    found = _known().get(name)
    if found is None:
        near = difflib.get_close_matches(name, _known(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"--engine {text}: {hint}choose one of {', '.join(_known())}")
    if equals and not version[:1].isdigit():
        raise InputError(f"--engine {text}: {version!r} is no version; write such as {name}=0.11.0, or {name} alone")
    values = {key: value for key, value in found.items() if key != "versions"}
    for start, changed in sorted((found.get("versions") or {}).items(), key=lambda each: version_key(each[0])):
        if not version or version_key(start) <= version_key(version):
            values |= changed
    values |= {key: parse_quantity(values[key], "s") for key in _SECONDS}
    return replace(Engine(name=name, **values), version=version)


def as_started(engine: Engine, prompt: int, users: int) -> Engine:
    """``engine`` as it is started for prompts of so many tokens from so many users."""
    if not engine.beside_prompt:
        return engine
    return replace(engine, token_budget=prompt + engine.beside_prompt + users)


def version_key(text: object) -> tuple[int, ...]:
    """Numbers of a version (``0.5.6.post2`` -> (0, 5, 6, 2)), to compare two of them."""
    digits = "".join(each if each.isdigit() else " " for each in str(text))
    return tuple(int(each) for each in digits.split()) or (0,)


# Values of an engine that a user may set, by their names on the command line, with the least and the most.
_CHANGEABLE: dict[str, tuple[float, float]] = {
    "token-budget": (1, 1 << 20),
    "sequences": (1, 1 << 20),
    "graph-sequences": (0, 1 << 20),
    "memory-share": (0.01, 1.0),
    "block": (1, 1 << 16),
    "server": (0, 60),
    "step": (0, 1),
    "sequence": (0, 1),
    "launch": (0, 1),
}
_NAMED: dict[str, tuple[str, ...]] = {"schedule": get_args(Schedule), "admission": get_args(Admission)}


def with_engine_options(engine: Engine, text: str) -> Engine:
    """``engine`` with the values of ``token-budget=2048,server=50ms``; ``InputError`` for what it does not have."""
    changed: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        field = name.replace("-", "_")
        if name in _NAMED:
            if value not in _NAMED[name]:
                raise InputError(f"--engine-options {part}: choose one of {', '.join(_NAMED[name])}")
            changed[field] = value
            continue
        if name not in _CHANGEABLE:
            near = difflib.get_close_matches(name, _CHANGEABLE, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--engine-options {part}: {hint}known: {', '.join((*_NAMED, *_CHANGEABLE))}")
        least, most = _CHANGEABLE[name]
        try:
            number = parse_quantity(value, "s") if field in _SECONDS else float(value)
        except ValueError as error:
            raise InputError(f"--engine-options {part}: {error}") from None
        if not least <= number <= most or (isinstance(getattr(engine, field), int) and number != int(number)):
            kind = "whole number" if isinstance(getattr(engine, field), int) else "number"
            raise InputError(f"--engine-options {part}: must be a {kind} from {least:g} to {most:.12g}")
        changed[field] = int(number) if isinstance(getattr(engine, field), int) else number
    return replace(engine, **changed)
