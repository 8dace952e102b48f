"""Base class of all requests, the parts that they share, and their registration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from costmodel.base.errors import InputError
from e2e.step.option_fields import Options, option
from e2e.step.options import STEP_PANEL
from e2e.whatif.questions import WhatIf, parse_what_if

if TYPE_CHECKING:
    from e2e.sources.prepared_step import PreparedStep
    from e2e.whatif.questions import Change

MACHINE_PANEL, ANSWER_PANEL = "The machine", "The answer"
GPU_HELP = (
    "Machine or cluster: a name (`python -m costmodel machines`) or a YAML file. Of a recorded run: the GPU it ran on, "
    "if its profile does not tell."
)
GPUS_HELP = (
    "GPUs of the whole job; a transformer of --model or --model-config is spread as --parallel says, without it in the "
    "way that is predicted to be fastest."
)


def _questions(value: str | WhatIf | Sequence[str | WhatIf]) -> tuple[WhatIf, ...]:
    each = [value] if isinstance(value, str | WhatIf) else value
    return tuple(parse_what_if(text) if isinstance(text, str) else text for text in each)


@dataclass(frozen=True, kw_only=True)
class Request(Options):
    """Base of all requests. A source is a class derived from it, registered by :func:`source`."""

    panel = ANSWER_PANEL

    # Title for messages: the kind of step.
    title: ClassVar[str]
    # Sets of options; any complete set selects this source.
    chosen_by: ClassVar[tuple[tuple[str, ...], ...]]
    # Function that prepares the step, as MODULE:FUNCTION: it is loaded on first use, as it may need PyTorch.
    prepared_by: ClassVar[str]
    # Reason in the error for an option that it lacks; empty: the error lists the sources that have the option.
    reason: ClassVar[str] = ""
    # True if the step is recorded, so its operators are fixed.
    recorded: ClassVar[bool] = False
    # True if single operators are known, so that some of them can be changed.
    single_operators: ClassVar[bool] = True

    what_if: tuple[WhatIf, ...] = option(
        "What if: batch=N, kernels:FAMILY=Kx, host=Kx, host=FILE, bucket-mb=N, batch-embeddings, fuse:REGEX; with + "
        "several at once. Repeatable: each alone, and all together.",
        default=(),
        several=True,
        read=_questions,
        write=lambda questions: " ".join(each.text for each in questions),
    )
    cuda_graph: bool = option(
        "The step is replayed as one CUDA graph.", default=False, default_text="no", panel=STEP_PANEL
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    @classmethod
    def is_meant(cls, given: Mapping[str, object]) -> bool:
        """True if the options ``given`` select this source."""
        return any(set(options) <= set(given) for options in cls.chosen_by)

    @classmethod
    def with_article(cls) -> str:
        """Return the title with an indefinite article."""
        return f"{'an' if cls.title[0] in 'aeiou' else 'a'} {cls.title}"

    def check(self) -> None:
        """Raise ``InputError`` for options that cannot be combined."""

    def settled(self) -> Self:
        """Return the request with its open options filled in by the step's recipe."""
        return self

    def settled_texts(self, asked: Self) -> dict[str, str]:
        """Describe, by option, the values that :meth:`settled` has set in ``asked``."""
        return {}

    def meant_texts(self, asked: Self) -> dict[str, str]:
        """Describe, by option, values of ``asked`` whose meaning in this settled request differs from their text."""
        return {}

    def prepare(self) -> PreparedStep:
        """Return the step, ready to be priced."""
        found: PreparedStep = resolve_name(self.prepared_by)(self)
        return found

    def captured_anew(self, change: Change) -> Self | None:
        """Return the request of a step with ``change``; ``None`` if the change is made to the existing graph."""
        return None


@dataclass(frozen=True, kw_only=True)
class Host(Options):
    """Host software of a step that is not recorded."""

    panel = MACHINE_PANEL

    overheads: Path | None = option(
        "Table of host overheads, a known host, or profiles of the very job (a file, pattern or archive); "
        "default: by the GPU's generation.",
        default=None,
        default_text="hosts of the GPU's generation",
    )


@dataclass(frozen=True, kw_only=True)
class Gpu(Options):
    """GPU of a step."""

    panel = MACHINE_PANEL

    gpu: str = option(GPU_HELP, read=os.fspath)


def _spread(value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"--speed-spread {value:g}: must be from 0 to 1")
    return value


@dataclass(frozen=True, kw_only=True)
class Nodes(Options):
    """Number of nodes, and the network between them."""

    panel = MACHINE_PANEL

    nodes: int | None = option("Nodes over which they are spread.", default=None, least=1, harmless=1)
    network: str | None = option(
        "Network between nodes, NAME:N for N cards per node; default: the cluster's own.", default=None
    )


@dataclass(frozen=True, kw_only=True)
class Cluster(Nodes, Gpu):
    """GPUs of a job of several ranks, and their variation."""

    panel = MACHINE_PANEL

    gpus: int | None = option(GPUS_HELP, default=None, least=1, harmless=1)
    speed_spread: float | None = option(
        "Standard deviation of the GPUs' speeds, such as 0.02; 0: all alike. Default: all as slow as the slowest of a "
        "band that is fitted to published steps.",
        default=None,
        read=_spread,
    )


# Registered sources; if the given options select several, the last one is used.
SOURCES: list[type[Request]] = []
R = TypeVar("R", bound=type[Request])


def source(title: str, *chosen_by: str, prepared_by: str = "") -> Callable[[R], R]:
    """Decorate a request class to register it as a source.

    ``title``: for messages; ``chosen_by``: texts of field names separated by spaces; the options select this class if
    all fields of one text are given, unless a class registered later is selected too; ``prepared_by``: MODULE:FUNCTION
    that prepares its step, for a class without its own ``prepare``.
    """

    def register(record: R) -> R:
        record.title = title
        record.chosen_by = tuple(tuple(each.split()) for each in chosen_by)
        record.prepared_by = prepared_by
        SOURCES.append(record)
        return record

    return register
