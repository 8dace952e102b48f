"""Requests of ``predict``: one class per source of steps, with its own options, and the choice among them.

| task | records |
|---|---|
| my model on N GPUs | :class:`Model`, :class:`SpreadModel` |
| my script | :class:`Program`, :class:`Script`, :class:`ScriptJob` |
| my trace | :class:`Trace`, :class:`Recording` |
| my tables | :class:`ShardedTables` |

:class:`Request` is their base, :func:`source` registers one, :func:`request_of` chooses the class for a user's options
and refuses options that the class does not have. Options that several requests have are records of their own
(:mod:`e2e.step.options`). Command lines import this module at their start: it loads no library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from e2e.parallelism.spec import ParallelSpec, keys_of, parse_parallel, text_of
from e2e.sources.recipes import DEFAULT_RECIPE, NUMBER_TYPES, PACKED_ATTENTION, TrainingRecipe, training_recipe
from e2e.step.option_fields import OptionField, Options, option, options_of
from e2e.step.options import (
    GPU_HELP,
    GPUS_HELP,
    MODEL_PANEL,
    STEP_PANEL,
    AttentionForm,
    CaptureOptions,
    ClusterOptions,
    ComputeOptions,
    Dtype,
    GpuOptions,
    HostOptions,
    LinearAttentionOptions,
    NodesOptions,
    OperatorOptions,
    SelectionOptions,
    SingleGpuOptions,
    StackOptions,
    StepFunction,
    script_name,
)
from e2e.whatif.questions import BatchChange, BucketChange, OtherHost, WhatIf, parse_what_if

if TYPE_CHECKING:
    from costmodel.machines.machine_records import Machine
    from e2e.sources.prepared_step import PreparedStep
    from e2e.whatif.questions import Change

SCRIPT_PANEL, TRACE_PANEL, TABLES_PANEL = "My program or script", "My trace", "My tables"
ANSWER_PANEL = "The answer"
TRACES_HELP = "PyTorch execution traces (.json, .gz, .tar.gz), one per rank: several files or patterns."


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
        "Ask about the step with a change: batch=N, kernels:FAMILY=Kx, host=Kx, host=FILE, bucket-mb=N, "
        "batch-embeddings, fuse:REGEX; several at once with +. Repeatable: each alone, and all together.",
        default=(),
        several=True,
        read=_questions,
        write=lambda questions: " ".join(each.text for each in questions),
    )
    cuda_graph: bool = option("Replay the step as one CUDA graph.", default=False, default_text="no", panel=STEP_PANEL)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    @classmethod
    def is_selected(cls, given: Mapping[str, object]) -> bool:
        """True if the options ``given`` select this source."""
        return any(set(options) <= set(given) for options in cls.chosen_by)

    @classmethod
    def with_article(cls) -> str:
        """Return the title with an indefinite article."""
        return f"{'an' if cls.title[0] in 'aeiou' else 'a'} {cls.title}"

    def check(self) -> None:
        """Raise ``InputError`` for options that cannot be combined."""

    def with_defaults(self) -> Self:
        """Return the request with its open options filled in by the step's recipe."""
        return self

    def default_texts(self, asked: Self) -> dict[str, str]:
        """Describe, by option, the values that :meth:`with_defaults` has set in ``asked``."""
        return {}

    def meaning_texts(self, asked: Self) -> dict[str, str]:
        """Describe, by option, values of ``asked`` whose meaning in this settled request differs from their text."""
        return {}

    def prepare(self) -> PreparedStep:
        """Return the step, ready to be priced."""
        found: PreparedStep = resolve_name(self.prepared_by)(self)
        return found

    def request_with(self, change: Change) -> Self | None:
        """Return the request of a step with ``change``; ``None`` if the change is made to the existing graph."""
        return None


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


# --- my model on N GPUs ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Modelled(Request, HostOptions, StackOptions, CaptureOptions, GpuOptions):
    """Request for a model that is built here."""

    panel = MODEL_PANEL

    model: str | None = option(
        "Built-in model, such as gpt2-large, resnet50 or timm/NAME (where timm is installed); docs/models.md "
        "lists all.",
        default=None,
        source=True,
        kw_only=False,
    )
    model_config: Path | None = option("Hugging Face configuration file.", default=None, source=True)

    @property
    def named(self) -> str | Path:
        """Name of the model, or its configuration file."""
        found = self.model or self.model_config
        assert found is not None
        return found

    @property
    def samples(self) -> int:
        """Samples per GPU and micro-batch."""
        return 1 if self.batch_size is None else self.batch_size

    def check(self) -> None:
        if (self.model is None) == (self.model_config is None):
            raise InputError("give exactly one of --model and --model-config")
        if self.precision is not None and self.mode == "inference":
            raise InputError(
                "--precision is how training casts, weights in every pass, and no engine serves so; give "
                "--model-config of a checkpoint whose quantization_config keeps weights in 8 bits, or leave "
                "--precision out"
            )
        if self.attention == "flash3-fp8" and self.mode != "inference":
            raise InputError(
                "--attention flash3-fp8: it has no gradients in 8 bits; give --mode inference, or name flash3"
            )

    @property
    def has_sequences(self) -> bool:
        """True if the model is a transformer."""
        from e2e.capture.models.configurations import PRESETS

        return self.model_config is not None or self.model in PRESETS or Path(self.model or "").suffix == ".json"

    def with_defaults(self) -> Self:
        """Return the request with the recipe's values for all options that were not given.

        Models without sequences have their own defaults. Raises ``InputError`` for a recipe that does not support the
        mode.
        """
        from costmodel.machines.cluster import load_gpu

        recipe = training_recipe(self.recipe)
        if not self.has_sequences:
            return self
        if recipe.serves and self.mode != "inference":
            raise InputError(f"--recipe {self.recipe}: is for inference; give --mode inference, or another recipe")
        machine = load_gpu(self.gpu)
        dtype = self.dtype or next((each for each in NUMBER_TYPES if each in machine.compute), "float32")
        attention = self.attention or self._attention(recipe, machine)
        return replace(self, dtype=dtype, attention=attention, stack=self.stack or recipe.stack)

    def _attention(self, recipe: TrainingRecipe, machine: Machine) -> AttentionForm:
        """Return the attention kernel of ``recipe``, or the nearest one that the library's model supports."""
        from e2e.capture.models.transformer import attention_forms
        from e2e.parallelism.parallel_graph import configuration

        if self.document_length is not None:
            return PACKED_ATTENTION
        wanted = recipe.kernel(machine)
        known = attention_forms(*configuration(self.named))
        return wanted if wanted in known or not known else next(iter(known))

    def _recipe_texts(self, asked: Self, masters: bool) -> dict[str, str]:
        """Describe, by option, the values that the recipe has set. ``masters``: with FP32 master weights."""
        if self is asked:
            return {}
        kept = "FP32 master weights and states" if masters else "no FP32 master weights"
        forward = self.mode != "train"
        recipe = f"{DEFAULT_RECIPE} ({training_recipe(asked.recipe).about}{'' if forward else ' and AdamW'})"
        dtype = f"{self.dtype}" + ("" if forward or self.dtype not in NUMBER_TYPES else f" ({kept})")
        return {"--recipe": recipe, "--dtype": dtype} | ({} if self.stack is None else {"--stack": self.stack})


@source("model on one GPU", "model", "model_config", prepared_by="e2e.sources.built_in_model:prepare_single")
@dataclass(frozen=True, kw_only=True)
class Model(LinearAttentionOptions, SingleGpuOptions, _Modelled):
    """Request for a built-in model or a Hugging Face configuration on one GPU."""

    panel = MODEL_PANEL

    # FP32 weights and optimizer states in addition to 16-bit weights; set by the recipe.
    master_weights: bool = False

    def check(self) -> None:
        super().check()
        if self.cache_length is not None and self.mode != "inference":
            raise InputError("--cache-length decodes: give --mode inference")

    def with_defaults(self) -> Self:
        found = super().with_defaults()
        if found is self:
            return self
        trains = self.mode == "train" and found.dtype in NUMBER_TYPES
        return replace(found, master_weights=trains and training_recipe(self.recipe).master_weights)

    def default_texts(self, asked: Self) -> dict[str, str]:
        return self._recipe_texts(asked, self.master_weights)

    def request_with(self, change: Change) -> Self | None:
        return replace(self, batch_size=change.samples) if isinstance(change, BatchChange) else None


@source("model spread over GPUs", "parallel", prepared_by="e2e.sources.built_in_model:prepare_spread")
@dataclass(frozen=True, kw_only=True)
class SpreadModel(_Modelled, ClusterOptions):
    """Request for a transformer spread over GPUs.

    Without ``parallel`` the fastest of several predicted ways is used.
    """

    panel = MODEL_PANEL
    single_operators = False

    parallel: ParallelSpec | None = option(
        "How the model is spread over GPUs, such as dp=8, fsdp=8 or tp=4,pp=2,micro-batches=8; "
        "docs/parallel.md has all keys.",
        default=None,
        write=text_of,
    )

    @classmethod
    def is_selected(cls, given: Mapping[str, Any]) -> bool:
        several = given.get("gpus", 1) > 1 or given.get("nodes", 1) > 1
        return super().is_selected(given) or (several and bool({"model", "model_config"} & set(given)))

    def __post_init__(self) -> None:
        if isinstance(self.parallel, str):
            object.__setattr__(self, "parallel", parse_parallel(self.parallel, self.gpus))
        super().__post_init__()

    def check(self) -> None:
        super().check()
        if self.mode == "forward-backward":
            raise InputError(
                "--parallel predicts training steps and forward passes (inference); leave --mode forward-backward out"
            )
        if self.attention == "mla":
            raise InputError("--attention mla decodes on one GPU yet; name another kernel")

    def with_defaults(self) -> Self:
        found = super().with_defaults()
        if found is self or found.parallel is None:
            return found
        masters, inference = found.dtype in NUMBER_TYPES, self.mode == "inference"
        spec = training_recipe(self.recipe).spread(
            found.parallel, masters=masters, inference=inference, length=self.sequence_length
        )
        return replace(found, parallel=spec)

    def default_texts(self, asked: Self) -> dict[str, str]:
        spec = self.parallel
        found = self._recipe_texts(asked, spec is not None and bool(spec.master_weights))
        if not found or spec is None or asked.parallel is None:
            return found
        given = keys_of(asked.parallel)
        more = {key: value for key, value in keys_of(spec).items() if key not in given and value not in ("no", "same")}
        return found | {"--parallel": ",".join(f"{key}={value}" for key, value in more.items())}

    def meaning_texts(self, asked: Self) -> dict[str, str]:
        given, spec = asked.parallel, self.parallel
        if given is None or spec is None or given.recompute == spec.recompute:
            return {}
        return {"--parallel": f"{text_of(given)} ({asked.recipe}'s {given.recompute}: recompute={spec.recompute} here)"}

    def request_with(self, change: Change) -> Self | None:
        if isinstance(change, BatchChange):
            return replace(self, batch_size=change.samples)
        if isinstance(change, OtherHost):
            return replace(self, overheads=change.table)
        if isinstance(change, BucketChange) and self.parallel is not None:
            return replace(self, parallel=replace(self.parallel, bucket_mb=change.mebibytes))
        return None


# --- my script ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scripted(Request, HostOptions, LinearAttentionOptions, SelectionOptions, CaptureOptions):
    """Request for a user's own step, run without a GPU."""

    panel = SCRIPT_PANEL

    script: StepFunction = option(
        "Function of a script that returns (module, step): FILE.py:FUNCTION.",
        source=True,
        write=script_name,
        kw_only=False,
    )

    def check(self) -> None:
        if self.attention in ("mla", "flash3-fp8"):
            raise InputError(
                "--attention mla and flash3-fp8 are for --model and --model-config; a script calls its own kernels"
            )

    def request_with(self, change: Change) -> Self | None:
        from e2e.capture.script import taken_names

        if isinstance(change, BatchChange) and "batch_size" in taken_names(self.script, ["batch_size"]):
            return replace(self, batch_size=change.samples)
        return None


@source("script on one GPU", "script", prepared_by="e2e.sources.user_script:prepare")
@dataclass(frozen=True, kw_only=True)
class Script(_Scripted, GpuOptions):
    """Request for a script's step on one GPU."""

    reason = "a script says itself what it runs"


def parse_ranks(value: str | Sequence[int]) -> tuple[int, ...]:
    """Parse ``"0,7"`` to (0, 7); raises ``InputError`` for other texts."""
    if not isinstance(value, str):
        return tuple(value)
    ranks = [whole_number(each) for each in value.split(",")]
    found = tuple(rank for rank in ranks if rank is not None)
    if len(found) < len(ranks):
        raise InputError(f"--ranks {value}: expected numbers such as 0,7")
    return found


@source("script on several GPUs", "script gpus", prepared_by="e2e.sources.user_script:prepare_ranks")
@dataclass(frozen=True, kw_only=True)
class ScriptJob(_Scripted, ClusterOptions):
    """Request for a script's step of several processes: DDP, FSDP2, tensor parallel ..."""

    panel = SCRIPT_PANEL
    reason = "a script says itself what it runs, and how it is spread"

    gpus: int = option(GPUS_HELP, least=1)
    ranks: tuple[int, ...] = option(
        "Ranks to capture, such as 0,7, where ranks differ in a way that a capture does not see.",
        default=(),
        read=parse_ranks,
    )
    # MiB of a gradient bucket, if a what-if question changes the script's own.
    bucket_mb: float | None = None

    def request_with(self, change: Change) -> Self | None:
        if isinstance(change, BucketChange):
            return replace(self, bucket_mb=change.mebibytes)
        return super().request_with(change)


@source("program", "command", prepared_by="e2e.sources.user_program:prepare")
@dataclass(frozen=True, kw_only=True)
class Program(Request, HostOptions, SelectionOptions, OperatorOptions, ClusterOptions):
    """Request for a step of the user's program, run as it is."""

    panel = SCRIPT_PANEL
    reason = "a program says itself what it runs, and how it is spread"
    buckets = True

    command: tuple[str, ...] = option(
        "Program to run as it is: put its command at the end of the line, after --.",
        several=True,
        source=True,
        kw_only=False,
    )
    data: Literal["real", "synthetic"] = option(
        "synthetic: make up data of the program that are missing here.", default="real", default_text="real"
    )
    folder: Path | None = option("Folder in which the program is started; default: this one.", default=None)
    ranks: tuple[int, ...] = option(
        "Ranks of --script to capture, such as 0,7, where they differ unseen.", default=(), read=parse_ranks
    )


# --- my trace -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Recorded(Request):
    """Request for a recorded step."""

    panel = TRACE_PANEL
    recorded = True

    dtype: Dtype | None = option("tf32: products of float32 run in TF32.", default=None)

    def check(self) -> None:
        if self.dtype not in (None, "tf32"):
            raise InputError(f"--dtype {self.dtype}: number types are as recorded; only tf32 changes them")


@source("execution trace", "traces", prepared_by="e2e.sources.recorded_job:prepare_trace")
@dataclass(frozen=True, kw_only=True)
class Trace(_Recorded, OperatorOptions, HostOptions, ClusterOptions):
    """Request from execution traces of one rank or of all ranks of a job: kernels and host times are predicted."""

    panel = TRACE_PANEL
    reason = "a recorded step brings its own"

    traces: tuple[str, ...] = option(
        TRACES_HELP,
        flag="--trace",
        several=True,
        source=True,
        kw_only=False,
    )

    def check(self) -> None:
        from e2e.traces.recorded_run import expand_files

        super().check()
        several = (self.gpus or 1) > 1 or (self.nodes or 1) > 1 or len(expand_files(self.traces)) > 1
        if self.speed_spread is not None and not several:
            raise InputError("--speed-spread is for several ranks; give --gpus")
        if self.network is not None and not several:
            raise InputError("--network is for jobs of several nodes; give --gpus and --nodes")


@source("recorded run", "kineto", prepared_by="e2e.sources.recorded_job:prepare_recording")
@dataclass(frozen=True, kw_only=True)
class Recording(_Recorded, NodesOptions):
    """Request from profiles of a run, with or without its execution traces: recorded kernel and host times are used."""

    panel = TRACE_PANEL
    reason = "a recorded run is as it was"

    kineto: tuple[str, ...] = option(
        "PyTorch profiles of a run, one per rank: several files or patterns. Its kernel and host times are "
        "used; --trace of the same run may be added.",
        several=True,
        source=True,
        kw_only=False,
    )
    traces: tuple[str, ...] = option(TRACES_HELP, default=(), flag="--trace", several=True, source=True)
    gpu: str | None = option(GPU_HELP, default=None, read=os.fspath)
    retarget: str | None = option("GPU or cluster to which the recorded run is moved.", default=None, read=os.fspath)

    def check(self) -> None:
        super().check()
        if self.network is not None and self.retarget is None:
            raise InputError("--network goes with --retarget: a recorded run had its own")
        if self.retarget is not None and not self.traces:
            raise InputError("--retarget needs the operators behind the kernels; give --trace of every rank too")


# --- my tables ------------------------------------------------------------------------------------


@source("sharded DLRM", "sharding", "tables", prepared_by="e2e.sources.built_in_model:prepare_sharded")
@dataclass(frozen=True, kw_only=True)
class ShardedTables(Request, HostOptions, ComputeOptions, ClusterOptions):
    """Request for a training step of DLRM with embedding tables sharded by a plan of ``python -m e2e shard``."""

    panel = TABLES_PANEL
    reason = "it is a training step of DLRM, spread as its plan says"
    single_operators = False

    tables: Path = option(
        "File of the embedding tables and the dense part (tables.yaml), with --model dlrm.",
        flag="--config",
        kw_only=False,
    )
    sharding: Path = option("Placement of the tables of --config (plan.json of `python -m e2e shard`).")
    gpus: int = option(GPUS_HELP, least=1)
    model: str = option("dlrm, which it is.", default="dlrm", source=True)

    def check(self) -> None:
        if self.model != "dlrm":
            raise InputError("--sharding and --config are for --model dlrm")

    def request_with(self, change: Change) -> Self | None:
        return replace(self, batch_size=change.samples) if isinstance(change, BatchChange) else None


# --- the choice among the sources ----------------------------------------------------------------


def all_options() -> dict[str, OptionField]:
    """Return every option of every source by name, with the help of the first source that has it."""
    found: dict[str, OptionField] = {}
    for record in SOURCES:
        for name, each in options_of(record).items():
            found.setdefault(name, each)
    return found


def request_of(options: Mapping[str, Any]) -> Request:
    """Make the request of ``options`` (by field, of all sources).

    Raises ``InputError`` for an option that the selected source does not have, and for a missing one.
    """
    known = all_options()
    read = {name: known[name].convert(value) for name, value in options.items()}
    given = {name: value for name, value in read.items() if known[name].is_given(value)}
    record = choose_source(given)
    if record is None:
        raise InputError(f"{_one_of(known)} (--trace may go with --kineto)")
    own = options_of(record)
    for name, value in given.items():
        if name not in own and value != known[name].words.harmless:
            raise InputError(_refusal(record, known[name], [each for each in known.values() if each.name in given]))
    missing = [each for name, each in own.items() if each.needed and name not in given]
    if missing:
        raise InputError("give " + "; ".join(f"{each.flag}: {each.words.help.removesuffix('.')}" for each in missing))
    return record(**{name: value for name, value in given.items() if name in own})


def choose_source(given: Mapping[str, Any]) -> type[Request] | None:
    """Return the source selected by the options ``given``: the last registered one among the matches, or ``None``."""
    found = [each for each in SOURCES if each.is_selected(given)]
    return found[-1] if found else None


def sources_with(option: str) -> list[type[Request]]:
    """Return the sources that have the option of this name."""
    return [record for record in SOURCES if option in options_of(record)]


def _one_of(known: Mapping[str, OptionField]) -> str:
    *others, last = [each.flag for each in known.values() if each.words.source]
    return f"give exactly one of {', '.join(others)} and {last}"


def _refusal(record: type[Request], refused: OptionField, given: Collection[OptionField]) -> str:
    if refused.words.source:
        saying = [each.flag for each in given if each.words.source or (each.name,) in record.chosen_by]
        return f"{_one_of(all_options())}, got {' and '.join(saying)}"
    others = ", ".join(f"{each.title} ({source_flags(each)})" for each in sources_with(refused.name))
    reason = f": {record.reason}" if record.reason else ""
    return f"{refused.flag} is no option of {record.with_article()}{reason}; leave it out (it is for: {others})"


def source_flags(record: type[Request]) -> str:
    """Format the options that select ``record``, as on a command line."""
    known = options_of(record)
    return " ".join(known[name].flag for name in record.chosen_by[0])
