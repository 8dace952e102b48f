"""What a request is made of: the base of all sources' records, the parts that they share, and their registration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from e2e.simulate.skew import Skew, parse_skew, skew_text
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
    """Base of what can be asked. A source is a record that derives from it, registered by
    :func:`source`.
    """

    panel = ANSWER_PANEL

    # For people: what the step is of.
    title: ClassVar[str]
    # Sets of options, any of which, given whole, means this source.
    chosen_by: ClassVar[tuple[tuple[str, ...], ...]]
    # Why it has no other options, for the refusal of one; empty: which sources have that option says it.
    reason: ClassVar[str] = ""
    # The step is a recorded one: its operators are as they were.
    recorded: ClassVar[bool] = False
    # Operators are known one by one, so that some of them can be changed.
    single_operators: ClassVar[bool] = True
    # It has gradient buckets.
    buckets: ClassVar[bool] = False

    what_if: tuple[WhatIf, ...] = option(
        "What if: batch=N, kernels:FAMILY=Kx, host=Kx, host=FILE, bucket-mb=N, stream:REGEX=N, batch-embeddings, "
        "fuse:REGEX; with + several at once. Repeatable: each alone, and all together.",
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
        """Whether the options ``given`` choose this source."""
        return any(set(options) <= set(given) for options in cls.chosen_by)

    @classmethod
    def with_article(cls) -> str:
        """The title in a sentence."""
        return f"{'an' if cls.title[0] in 'aeiou' else 'a'} {cls.title}"

    def check(self) -> None:
        """``InputError`` for options that do not go together."""

    def settled(self) -> Self:
        """With what is left open as the step's recipe has it."""
        return self

    def settled_texts(self, asked: Self) -> dict[str, str]:
        """By option, what :meth:`settled` has put into ``asked``."""
        return {}

    def meant_texts(self, asked: Self) -> dict[str, str]:
        """By option, what a value of ``asked`` means in this settled request, where it does not say that itself."""
        return {}

    def prepare(self) -> PreparedStep:
        """The step, ready to be priced."""
        raise NotImplementedError

    def captured_anew(self, change: Change) -> Self | None:
        """The request of a step with ``change``; ``None`` where that is made to the graph of the step as it is."""
        return None


@dataclass(frozen=True, kw_only=True)
class Host(Options):
    """The software that launches a step which is computed anew."""

    panel = MACHINE_PANEL

    overheads: Path | None = option(
        "Table of host overheads, a known host, or profiles of the very job (a file, pattern or archive); "
        "default: by the GPU's generation.",
        default=None,
        default_text="hosts of the GPU's generation",
    )


@dataclass(frozen=True, kw_only=True)
class Gpu(Options):
    """The GPU of a step."""

    panel = MACHINE_PANEL

    gpu: str = option(GPU_HELP, read=os.fspath)


@dataclass(frozen=True, kw_only=True)
class Nodes(Options):
    """Over how many nodes GPUs are spread, and the network between them."""

    panel = MACHINE_PANEL

    nodes: int | None = option("Nodes over which they are spread.", default=None, least=1, harmless=1)
    network: str | None = option(
        "Network between nodes, NAME:N for N cards per node; default: the cluster's own.", default=None
    )


@dataclass(frozen=True, kw_only=True)
class Cluster(Nodes, Gpu):
    """The GPUs of a job of several ranks, and how they differ."""

    panel = MACHINE_PANEL

    gpus: int | None = option(GPUS_HELP, default=None, least=1, harmless=1)
    skew: Skew | None = option(
        "How ranks vary: spread=0.02,jitter=0.05,seed=1,start=RANK:MS.",
        default=None,
        read=lambda value: parse_skew(value) if isinstance(value, str) else value,
        write=skew_text,
    )


# Registered ones; of several that the given options choose the last is meant.
SOURCES: list[type[Request]] = []
R = TypeVar("R", bound=type[Request])


def source(title: str, *chosen_by: str) -> Callable[[R], R]:
    """Decorator that registers a record as what can be asked. ``title``: for people; ``chosen_by``: fields with spaces
    between them: where all of one of these texts are given, this record is meant, unless one that is registered later
    is too.
    """

    def register(record: R) -> R:
        record.title = title
        record.chosen_by = tuple(tuple(each.split()) for each in chosen_by)
        SOURCES.append(record)
        return record

    return register
