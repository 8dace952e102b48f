"""Serving engines: scheduler, token budget, kernels and host times, by version (``engines.yaml``)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import Machine, Quantity
from costmodel.machines.record_file import explain_problems, read_mapping, validated
from costmodel.operators.attention import AttentionKernel
from costmodel.operators.experts import ExpertKernel
from e2e.step.options import named_values

# ``mixed``: prompts are cut to fill the token budget of a step beside single tokens; ``prefill-first``: a batch of
# prompts runs alone before decoding goes on; ``whole-prompts``: whole prompts join the step of single tokens.
Schedule = Literal["mixed", "prefill-first", "whole-prompts"]
# Which waiting sequences start: ``prompt``: those whose prompts the cache has room for; ``estimate``: those for which
# the running ones leave room by an estimate of their outputs; ``no-evict``: those that can reach their ends. With the
# first two, sequences are preempted when the cache is full.
Admission = Literal["prompt", "estimate", "no-evict"]
# Of which models all-reduce, residual and norm are one kernel: of all on datacenter Blackwell alone, of mixtures on all
# GPUs too, of all.
Fused = Literal["none", "blackwell", "mixtures", "all"]
# What the engine's share of the memory holds: weights, activations, cache and all that the process takes (``whole``);
# all but its context and graphs (``profiled``); the cache alone, of the memory that is free otherwise (``free``).
Share = Literal["whole", "profiled", "free"]
FILE = Path(__file__).with_name("engines.yaml")
_Count = Annotated[int, Field(ge=1, le=1 << 20)]
_Seconds = Annotated[float, Quantity("s", above_zero=False, most=60)]
# Values that a user may set.
_OPTIONS = (
    "schedule", "admission", "token-budget", "sequences", "graph-sequences", "memory-share", "block", "server", "step",
    "sequence", "launch", "stream",
)  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """One serving engine in one version."""

    name: str
    title: str
    start: str  # template of the command that starts it (:func:`e2e.serving.serving_plan.start_command`)
    schedule: Schedule
    admission: Admission
    token_budget: _Count  # most tokens of one step
    sequences: _Count  # most that run at once
    graph_sequences: Annotated[int, Field(ge=0, le=1 << 20)]  # most sequences of a step that is a CUDA graph
    memory_share: Annotated[float, Field(ge=0.01, le=1)]  # of the GPU's memory
    block: _Count  # tokens of a block of the cache
    attention: AttentionKernel
    experts: ExpertKernel
    all_reduce: str
    fuses_casts: bool  # casts to 8 bits are part of the kernel before
    fuses_norms: Fused
    server: _Seconds  # seconds before the first token: HTTP, tokeniser, queues between processes
    step: _Seconds  # seconds of the host per step
    sequence: _Seconds  # per sequence of a step
    launch: _Seconds  # per kernel that is launched without a graph
    stream: _Count = 1  # tokens of a message to the client; the first one waits for as many
    version: str = ""
    memory: Share = "whole"
    fuses_shared: bool = False  # shared experts are computed by the kernel of the others
    overlaps: bool = False  # the next step is planned while one runs: who arrives meanwhile waits for both
    shares_budget: bool = False  # copies of the attention share one token budget; else each has a whole one
    in_dynamo: bool = False  # known as NVIDIA's recipes start it, behind their front end Dynamo
    # Where a recipe sets the token budget to one prompt, this, and one token per user (0: ``token_budget`` stands).
    beside_prompt: int = 0
    user_slots: bool = False  # a recipe sets ``sequences`` to the users
    idle_slots: int = 0  # of ``sequences``, which are never used
    # Factors, each way, within which 80 % of the means of measured runs lie, beside the errors of their kernels.
    band_tpot: float = 1.08
    band_ttft: float = 1.65


@lru_cache(maxsize=1)
def _known() -> dict[str, dict[str, Any]]:
    return read_mapping(FILE, InputError, "must be a mapping of engines")


def engine_named(
    text: str, options: str = "", prompt: int = 0, users: int = 0, machine: Machine | None = None, ranks: int = 1
) -> Engine:
    """The engine of ``NAME`` or ``NAME=VERSION``, started for prompts of ``prompt`` tokens from so many ``users`` on so
    many GPUs of ``machine``, with the values of ``token-budget=2048,server=50ms`` changed; ``InputError`` for an
    unknown name and for what an engine does not have.
    """
    name, equals, version = text.partition("=")
    found = _known().get(name)
    if found is None:
        near = difflib.get_close_matches(name, _known(), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"--engine {text}: {hint}choose one of {', '.join(_known())}")
    if equals and not version[:1].isdigit():
        raise InputError(f"--engine {text}: {version!r} is no version; write such as {name}=0.11.0, or {name} alone")
    values = {key: value for key, value in found.items() if key not in ("versions", "by_gpu")}
    values |= {"name": name, "version": version}
    for start, changed in sorted((found.get("versions") or {}).items(), key=lambda each: version_key(each[0])):
        if not version or version_key(start) <= version_key(version):
            values |= changed
    if machine is not None:
        values |= _defaults_of(found.get("by_gpu") or (), version, machine, ranks)
    if values.get("beside_prompt"):
        values["token_budget"] = prompt + values["beside_prompt"] + users
    if values.get("user_slots") and users:
        values["sequences"] = users
    asked = named_values("--engine-options", options, _OPTIONS)
    values |= {key.replace("-", "_"): value for key, value in asked.items()}
    try:
        return validated(values, Engine)
    except ValidationError as error:
        raise InputError(f"--engine-options {options}: {explain_problems(error).replace('_', '-')}") from None


def _defaults_of(entries: Iterable[Mapping[str, Any]], version: str, machine: Machine, ranks: int) -> dict[str, Any]:
    """What an engine sets on GPUs of ``machine``: the first of ``entries`` that is for its memory or architecture, so
    many ranks and ``version``.
    """
    memory, architecture = float(machine.memory[-1].usable) / 2**30, machine.chip().architecture
    for entry in entries:
        changed = dict(entry)
        since, most, least = changed.pop("since", "0"), changed.pop("below", math.inf), changed.pop("ranks", 1)
        fits = changed.pop("architecture", None) == architecture or memory < most
        if fits and ranks >= least and (not version or version_key(since) <= version_key(version)):
            return changed
    return {}


def version_key(text: object) -> tuple[int, ...]:
    """Numbers of a version (``0.5.6.post2`` -> (0, 5, 6, 2)), to compare two of them."""
    digits = "".join(each if each.isdigit() else " " for each in str(text))
    return tuple(int(each) for each in digits.split()) or (0,)
