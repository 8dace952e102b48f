"""The table of options x sources: what is used, needed, refused or without effect, and why.

A row holds for every source by its ``otherwise``, but for those that its ``cells`` name. The few rules between options
are in :data:`PAIR_RULES`. Errors, warnings, the notes in the help and ``docs/options.md`` all come from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from e2e.predict.request import Request

Effect = Literal["used", "needed", "refused", "without effect"]


@dataclass(frozen=True)
class Rule:
    """What an option does for a source. ``sentence``: what the user is told (``{value}``: what was given, ``{given}``:
    the sources that were); ``allowed``: values that are as good as none where others are refused or do nothing.
    """

    effect: Effect
    sentence: str = ""
    allowed: tuple[Any, ...] = ()


def needed(sentence: str) -> Rule:
    return Rule("needed", sentence)


def refused(sentence: str, *allowed: Any) -> Rule:
    return Rule("refused", sentence, allowed)


def without_effect(sentence: str, *allowed: Any) -> Rule:
    return Rule("without effect", sentence, allowed)


@dataclass(frozen=True)
class OptionRow:
    """``option`` as on the command line, its place in the request, and its rules by name of the source."""

    option: str
    record: Literal["workload", "configuration", "machine"]
    name: str
    otherwise: Rule
    cells: Mapping[str, Rule] = field(default_factory=dict)

    def value(self, request: Request) -> Any:
        return getattr(getattr(request, self.record), self.name)

    def given(self, request: Request) -> bool:
        """Whether it says something else than nothing."""
        record = getattr(request, self.record)
        return bool(getattr(record, self.name) != _defaults(type(record))[self.name])


def _defaults(record: type) -> dict[str, Any]:
    return {each.name: each.default for each in fields(record)}


BUILT_IN, CONFIGURATION, SCRIPT, RANKS_OF_SCRIPT = "model", "configuration", "script", "distributed-script"
TRACE, RECORDING, PARALLEL, SHARDED = "trace", "recording", "parallel", "sharded"

USED = Rule("used")
# Sentences that several cells tell.
_ONE_SOURCE = refused("give exactly one of --model, --model-config, --script and --trace, got {given}")
_SCRIPT_ALONE = refused("give --script alone, without --model, --model-config, --trace")
_PROFILE_ALONE = refused("--kineto goes with --trace alone; leave --model, --model-config and --script out")
_TABLES_ALONE = refused("--sharding places tables of --model dlrm; give no other source")
_TABLES_OF_DLRM = refused("--sharding and --config are for --model dlrm", "dlrm")
_TABLES_ELSEWHERE = refused("the tables of a recorded run are where they were; leave --config and --sharding out")
_COMPLETE_TABLES = needed(
    "give --config tables.yaml, --sharding plan.json (`python -m e2e shard` makes one) and --gpus"
)
_SPREAD = (
    "say how the work is spread, such as --parallel dp=8 or --parallel fsdp=8 (a --script says it itself, with --gpus)"
)
_RECORDED = without_effect("a recorded step brings its own")
_ONLY_TF32 = without_effect("number types are as recorded; only tf32 changes them", "tf32")
_NO_RANKS = without_effect("it names ranks of a --script")
_ONE_GPU_YET = "--compile is for one GPU yet; leave it out"
_TRAINING = "predicts training steps; leave --mode {value} out"

TABLE: tuple[OptionRow, ...] = (
    # What is computed.
    OptionRow(
        "--model",
        "workload",
        "model",
        _ONE_SOURCE,
        {
            BUILT_IN: USED,
            RANKS_OF_SCRIPT: _SCRIPT_ALONE,
            RECORDING: _PROFILE_ALONE,
            PARALLEL: USED,
            SHARDED: _TABLES_OF_DLRM,
        },
    ),
    OptionRow(
        "--model-config",
        "workload",
        "model_config",
        _ONE_SOURCE,
        {
            CONFIGURATION: USED,
            RANKS_OF_SCRIPT: _SCRIPT_ALONE,
            RECORDING: _PROFILE_ALONE,
            PARALLEL: USED,
            SHARDED: _TABLES_ALONE,
        },
    ),
    OptionRow(
        "--script",
        "workload",
        "script",
        _ONE_SOURCE,
        {
            SCRIPT: USED,
            RANKS_OF_SCRIPT: USED,
            RECORDING: _PROFILE_ALONE,
            PARALLEL: refused("--parallel is for built-in models; a --script says itself how it is spread"),
            SHARDED: _TABLES_ALONE,
        },
    ),
    OptionRow(
        "--trace",
        "workload",
        "traces",
        _ONE_SOURCE,
        {
            TRACE: USED,
            RANKS_OF_SCRIPT: _SCRIPT_ALONE,
            RECORDING: USED,
            PARALLEL: refused("--parallel is for built-in models; an execution trace is of one rank"),
            SHARDED: _TABLES_ALONE,
        },
    ),
    OptionRow("--kineto", "workload", "kineto", _PROFILE_ALONE, {RECORDING: USED}),
    OptionRow(
        "--config", "workload", "tables", _TABLES_OF_DLRM, {SHARDED: _COMPLETE_TABLES, RECORDING: _TABLES_ELSEWHERE}
    ),
    OptionRow("--batch-size", "workload", "batch_size", USED, {TRACE: _RECORDED, RECORDING: _RECORDED}),
    OptionRow(
        "--sequence-length",
        "workload",
        "sequence_length",
        USED,
        {TRACE: _RECORDED, RECORDING: _RECORDED, SHARDED: without_effect("DLRM has no sequences")},
    ),
    OptionRow(
        "--mode",
        "workload",
        "mode",
        USED,
        {
            TRACE: _RECORDED,
            RECORDING: _RECORDED,
            PARALLEL: refused(f"--parallel {_TRAINING}"),
            SHARDED: refused(f"--sharding {_TRAINING}"),
        },
    ),
    # How it is computed.
    OptionRow("--dtype", "configuration", "dtype", USED, {TRACE: _ONLY_TF32, RECORDING: _ONLY_TF32}),
    OptionRow(
        "--attention",
        "configuration",
        "attention",
        USED,
        {TRACE: _RECORDED, RECORDING: _RECORDED, SHARDED: without_effect("DLRM has no attention")},
    ),
    OptionRow("--cuda-graph", "configuration", "cuda_graph", USED),
    OptionRow(
        "--compile",
        "configuration",
        "compiled",
        USED,
        {
            RANKS_OF_SCRIPT: refused(_ONE_GPU_YET),
            RECORDING: refused("--compile: a recorded run was compiled or not; leave it out"),
            PARALLEL: refused(f"{_ONE_GPU_YET} with --parallel"),
            SHARDED: refused(f"{_ONE_GPU_YET} with --sharding"),
        },
    ),
    OptionRow(
        "--overheads",
        "configuration",
        "overheads",
        USED,
        {RECORDING: refused("--kineto brings its own host overheads; leave --overheads out")},
    ),
    OptionRow(
        "--parallel",
        "configuration",
        "parallel",
        refused("--parallel is for built-in models; leave it out"),
        {
            PARALLEL: USED,
            RECORDING: refused("--parallel: a recorded run is spread as it was; leave it out"),
            SHARDED: _TABLES_ALONE,
        },
    ),
    OptionRow(
        "--sharding",
        "configuration",
        "sharding",
        _TABLES_ALONE,
        {SHARDED: _COMPLETE_TABLES, RECORDING: _TABLES_ELSEWHERE},
    ),
    OptionRow(
        "--ranks",
        "configuration",
        "ranks",
        refused("--ranks names ranks of a --script on several --gpus"),
        {RANKS_OF_SCRIPT: USED, RECORDING: _RECORDED, PARALLEL: _NO_RANKS, SHARDED: _NO_RANKS},
    ),
    # On what.
    OptionRow(
        "--gpu",
        "machine",
        "gpu",
        needed("give --gpu: a name (`python -m costmodel machines`) or a YAML file"),
        {RECORDING: USED},
    ),
    OptionRow(
        "--gpus",
        "machine",
        "gpus",
        refused("{value} GPUs: " + _SPREAD, 1),
        {
            RANKS_OF_SCRIPT: USED,
            TRACE: USED,
            RECORDING: refused("--gpus: a recorded run has its own number of ranks; leave it out"),
            PARALLEL: USED,
            SHARDED: _COMPLETE_TABLES,
        },
    ),
    OptionRow(
        "--nodes",
        "machine",
        "nodes",
        refused("{value} nodes: " + _SPREAD, 1),
        {RANKS_OF_SCRIPT: USED, TRACE: USED, RECORDING: USED, PARALLEL: USED, SHARDED: USED},
    ),
    OptionRow(
        "--network",
        "machine",
        "network",
        refused("--network is for jobs of several nodes; give --parallel and --nodes"),
        {RANKS_OF_SCRIPT: USED, TRACE: USED, RECORDING: USED, PARALLEL: USED, SHARDED: USED},
    ),
    OptionRow(
        "--retarget",
        "machine",
        "retarget",
        refused("--retarget moves a recorded run; give --kineto and --trace"),
        {RECORDING: USED},
    ),
    OptionRow(
        "--skew",
        "machine",
        "skew",
        refused("--skew is for several ranks; give --parallel, or --gpus"),
        {
            RANKS_OF_SCRIPT: USED,
            TRACE: USED,
            RECORDING: refused("--skew: a recorded run has its own; leave it out"),
            PARALLEL: USED,
            SHARDED: USED,
        },
    ),
)


@dataclass(frozen=True)
class PairRule:
    """Of ``source``: ``broken`` tells requests whose options do not go together, ``when`` in words what it tells."""

    source: str
    when: str
    broken: Callable[[Request], bool]
    sentence: str


def several(request: Request) -> bool:
    """Whether more than one GPU is asked for."""
    return (request.machine.gpus or 1) > 1 or (request.machine.nodes or 1) > 1


COMPILED_RANKS = _ONE_GPU_YET
PAIR_RULES: tuple[PairRule, ...] = (
    PairRule(
        TRACE,
        "several --trace without --kineto",
        lambda request: len(request.workload.traces) > 1,
        "several --trace files are ranks of one job; give the --kineto of each too",
    ),
    PairRule(
        TRACE,
        "--compile on several GPUs",
        lambda request: request.configuration.compiled and several(request),
        COMPILED_RANKS,
    ),
    PairRule(
        TRACE,
        "--skew on one GPU",
        lambda request: request.machine.skew is not None and not several(request),
        "--skew is for several ranks; give --parallel, or --gpus",
    ),
    PairRule(
        TRACE,
        "--network on one GPU",
        lambda request: request.machine.network is not None and not several(request),
        "--network is for jobs of several nodes; give --gpus and --nodes",
    ),
    PairRule(
        RECORDING,
        "--network without --retarget",
        lambda request: request.machine.network is not None and request.machine.retarget is None,
        "--network goes with --retarget: a recorded run had its own",
    ),
    PairRule(
        RECORDING,
        "--retarget without --trace",
        lambda request: request.machine.retarget is not None and not request.workload.traces,
        "--retarget needs the operators behind the kernels; give --trace of every rank too",
    ),
    PairRule(
        PARALLEL,
        "not exactly one of --model and --model-config",
        lambda request: (request.workload.model is None) == (request.workload.model_config is None),
        "--parallel: give exactly one of --model and --model-config",
    ),
)
