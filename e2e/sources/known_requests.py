"""Requests of ``predict``: one class per source of steps, each with only its own options.

| task | records |
|---|---|
| my model on N GPUs | :class:`Model`, :class:`SpreadModel` |
| my script | :class:`Script`, :class:`ScriptJob` |
| my trace | :class:`Trace`, :class:`Recording` |
| my tables | :class:`ShardedTables` |

Shared parts are in :mod:`e2e.step.options` (how the step is computed) and :mod:`e2e.sources.request` (the hardware).
:mod:`e2e.sources.registry` selects the class for a user's options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from e2e.capture.script_reference import StepFunction, script_name
from e2e.parallelism.spec import ParallelSpec, parse_parallel, text_of
from e2e.sources.request import GPU_HELP, GPUS_HELP, Cluster, Gpu, Host, Nodes, Request, source
from e2e.step.choices import Dtype
from e2e.step.option_fields import option
from e2e.step.options import (
    MODEL_PANEL,
    AloneOnGpu,
    Captured,
    Computed,
    LinearAttention,
    Routed,
    Stack,
)
from e2e.whatif.questions import BatchChange, BucketChange, OtherHost

if TYPE_CHECKING:
    from e2e.sources.prepared_step import PreparedStep
    from e2e.whatif.questions import Change

TRACES_HELP = "PyTorch execution traces (.json, .gz, .tar.gz), one per rank: several files or patterns."
SCRIPT_PANEL, TRACE_PANEL, TABLES_PANEL = "My script", "My trace", "My tables"


# --- my model on N GPUs ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Modelled(Request, Host, Stack, Captured):
    """Request for a model that is built here."""

    panel = MODEL_PANEL

    model: str | None = option(
        "Built-in model, such as gpt2-large, resnet50 or timm/NAME (where timm is installed); the error of an "
        "unknown name lists them, and so does docs/models.md.",
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

    def settled(self) -> Self:
        from e2e.sources import recipes

        fill: Any = recipes.settled  # for the two classes derived from this one
        found: Self = fill(self)
        return found

    def settled_texts(self, asked: Self) -> dict[str, str]:
        from e2e.sources import recipes

        return recipes.settled_texts(asked, self)  # type: ignore[arg-type]


@source("model on one GPU", "model", "model_config")
@dataclass(frozen=True, kw_only=True)
class Model(LinearAttention, AloneOnGpu, _Modelled, Gpu):
    """Request for a built-in model or a Hugging Face configuration on one GPU."""

    panel = MODEL_PANEL

    # FP32 weights and optimizer states in addition to 16-bit weights; set by the recipe.
    master_weights: bool = False

    def check(self) -> None:
        super().check()
        if self.cache_length is not None and self.mode != "inference":
            raise InputError("--cache-length decodes: give --mode inference")

    def prepare(self) -> PreparedStep:
        from e2e.sources.single_gpu import prepare_single

        return prepare_single(self)

    def captured_anew(self, change: Change) -> Self | None:
        return replace(self, batch_size=change.samples) if isinstance(change, BatchChange) else None


@source("model spread over GPUs", "parallel")
@dataclass(frozen=True, kw_only=True)
class SpreadModel(_Modelled, Cluster):
    """Request for a transformer spread over GPUs.

    Without ``parallel`` the fastest of several predicted ways is used.
    """

    panel = MODEL_PANEL
    single_operators = False
    buckets = True

    parallel: ParallelSpec | None = option(
        "How a built-in model is spread: dp=8, fsdp=8, tp=4,pp=2,micro-batches=8, cp=4,zero=3, dp=8,ep=8 ...",
        default=None,
        write=text_of,
    )

    @classmethod
    def is_meant(cls, given: Mapping[str, Any]) -> bool:
        several = given.get("gpus", 1) > 1 or given.get("nodes", 1) > 1
        return super().is_meant(given) or (several and bool({"model", "model_config"} & set(given)))

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

    def meant_texts(self, asked: Self) -> dict[str, str]:
        from e2e.sources.recipes import meant_texts

        return meant_texts(asked, self)

    def prepare(self) -> PreparedStep:
        from e2e.sources.spread_model import prepare_spread

        return prepare_spread(self)

    def captured_anew(self, change: Change) -> Self | None:
        if isinstance(change, BatchChange):
            return replace(self, batch_size=change.samples)
        if isinstance(change, OtherHost):
            return replace(self, overheads=change.table)
        if isinstance(change, BucketChange) and self.parallel is not None:
            return replace(self, parallel=replace(self.parallel, bucket_mb=change.mebibytes))
        return None


# --- my script ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scripted(Request, Host, LinearAttention, Captured):
    """Request for a user's own step, run without a GPU."""

    panel = SCRIPT_PANEL

    script: StepFunction = option(
        "FILE.py:FUNCTION that returns (module, step).",
        source=True,
        write=script_name,
        kw_only=False,
    )
    # MiB of a gradient bucket, if a what-if question changes the script's own.
    bucket_mb: float | None = None

    def check(self) -> None:
        if self.attention in ("mla", "flash3-fp8"):
            raise InputError(
                "--attention mla and flash3-fp8 are for --model and --model-config; a script calls its own kernels"
            )

    def captured_anew(self, change: Change) -> Self | None:
        from e2e.capture.script import taken_names

        if isinstance(change, BatchChange) and "batch_size" in taken_names(self.script, ["batch_size"]):
            return replace(self, batch_size=change.samples)
        if isinstance(change, BucketChange) and self.buckets:
            return replace(self, bucket_mb=change.mebibytes)
        return None


@source("script on one GPU", "script")
@dataclass(frozen=True, kw_only=True)
class Script(_Scripted, Gpu):
    """Request for a script's step on one GPU."""

    reason = "a script says itself what it runs"

    def prepare(self) -> PreparedStep:
        from e2e.sources.user_script import prepare

        return prepare(self)


def parse_ranks(value: str | Sequence[int]) -> tuple[int, ...]:
    """Parse ``"0,7"`` to (0, 7); raises ``InputError`` for other texts."""
    if not isinstance(value, str):
        return tuple(value)
    ranks = [whole_number(each) for each in value.split(",")]
    found = tuple(rank for rank in ranks if rank is not None)
    if len(found) < len(ranks):
        raise InputError(f"--ranks {value}: expected numbers such as 0,7")
    return found


@source("script on several GPUs", "script gpus")
@dataclass(frozen=True, kw_only=True)
class ScriptJob(_Scripted, Cluster):
    """Request for a script's step of several processes: DDP, FSDP2, tensor parallel ..."""

    panel = SCRIPT_PANEL
    reason = "a script says itself what it runs, and how it is spread"
    buckets = True

    gpus: int = option(GPUS_HELP, least=1)
    ranks: tuple[int, ...] = option(
        "Ranks of --script to capture, such as 0,7, where they differ unseen.", default=(), read=parse_ranks
    )

    def prepare(self) -> PreparedStep:
        from e2e.sources.user_script import prepare_ranks

        return prepare_ranks(self)


# --- my trace -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Recorded(Request):
    """Request for a recorded step."""

    panel = TRACE_PANEL
    recorded = True
    buckets = True

    dtype: Dtype | None = option("tf32: products of float32 run in TF32.", default=None)

    def check(self) -> None:
        if self.dtype not in (None, "tf32"):
            raise InputError(f"--dtype {self.dtype}: number types are as recorded; only tf32 changes them")


@source("execution trace", "traces")
@dataclass(frozen=True, kw_only=True)
class Trace(_Recorded, Routed, Host, Cluster):
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
        if self.skew is not None and not several:
            raise InputError("--skew is for several ranks; give --gpus")
        if self.network is not None and not several:
            raise InputError("--network is for jobs of several nodes; give --gpus and --nodes")

    def prepare(self) -> PreparedStep:
        from e2e.sources.traced_job import prepare_trace

        return prepare_trace(self)


@source("recorded run", "kineto")
@dataclass(frozen=True, kw_only=True)
class Recording(_Recorded, Nodes):
    """Request from profiles of a run, with or without its execution traces: recorded kernel and host times are used."""

    panel = TRACE_PANEL
    reason = "a recorded run is as it was"

    kineto: tuple[str, ...] = option(
        "Profiles of the same run as --trace, one per rank: several files or patterns. Their host times and "
        "kernels are used.",
        several=True,
        source=True,
        kw_only=False,
    )
    traces: tuple[str, ...] = option(TRACES_HELP, default=(), flag="--trace", several=True, source=True)
    gpu: str | None = option(GPU_HELP, default=None, read=os.fspath)
    retarget: str | None = option("GPU (or cluster) to move a recorded run to.", default=None, read=os.fspath)

    def check(self) -> None:
        super().check()
        if self.network is not None and self.retarget is None:
            raise InputError("--network goes with --retarget: a recorded run had its own")
        if self.retarget is not None and not self.traces:
            raise InputError("--retarget needs the operators behind the kernels; give --trace of every rank too")

    def prepare(self) -> PreparedStep:
        from e2e.sources.recorded_job import prepare_recording

        return prepare_recording(self)


# --- my tables ------------------------------------------------------------------------------------


@source("sharded DLRM", "sharding", "tables")
@dataclass(frozen=True, kw_only=True)
class ShardedTables(Request, Host, Computed, Cluster):
    """Request for a training step of DLRM with embedding tables sharded by a plan of ``python -m e2e shard``."""

    panel = TABLES_PANEL
    reason = "it is a training step of DLRM, spread as its plan says"
    single_operators = False

    tables: Path = option("tables.yaml of --model dlrm.", flag="--config", kw_only=False)
    sharding: Path = option("plan.json that places the tables of --config (`python -m e2e shard` makes one).")
    gpus: int = option(GPUS_HELP, least=1)
    model: str = option("dlrm, which it is.", default="dlrm", source=True)

    def check(self) -> None:
        if self.model != "dlrm":
            raise InputError("--sharding and --config are for --model dlrm")

    def prepare(self) -> PreparedStep:
        from e2e.sources.sharded_model import prepare_sharded

        return prepare_sharded(self)

    def captured_anew(self, change: Change) -> Self | None:
        return replace(self, batch_size=change.samples) if isinstance(change, BatchChange) else None
