"""The table of options x sources: what is used, needed, refused or without effect, and why.

A row holds for every source by its first rule, but for those that are named after it. The few rules between options
are in :data:`PAIR_RULES`. Errors, warnings, the notes in the help and ``docs/options.md`` all come from here.
"""

from __future__ import annotations

from e2e.sources.asked.request import PredictRequest
from e2e.sources.asked.rule_types import OptionRow, OptionRule, PairRule, needed, refused, without_effect

# Names of sources; what they are: e2e/sources/registry.py.
BUILT_IN, CONFIGURATION, SCRIPT, RANKS_OF_SCRIPT = "model", "configuration", "script", "distributed-script"
TRACE, RECORDING, PARALLEL, SHARDED = "trace", "recording", "parallel", "sharded"

USED = OptionRule("used")

# Cells that several options or sources share.
_ONE_SOURCE = refused("give exactly one of --model, --model-config, --script and --trace, got {given}")
_SCRIPT_ALONE = refused("give --script alone, without --model, --model-config, --trace")
_PROFILE_ALONE = refused("--kineto goes with --trace alone; leave --model, --model-config and --script out")
_TABLES_ALONE = refused("--sharding places tables of --model dlrm; give no other source")
_OF_DLRM = refused("--sharding and --config are for --model dlrm", "dlrm")
_TABLES_STAY = refused("the tables of a recorded run are where they were; leave --config and --sharding out")
_TABLES_AND_PLAN = needed(
    "give --config tables.yaml, --sharding plan.json (`python -m e2e shard` makes one) and --gpus"
)
_NOT_SPREAD = (
    "say how the work is spread, such as --parallel dp=8 or --parallel fsdp=8 (a --script says it itself, with --gpus)"
)
_RECORDED = without_effect("a recorded step brings its own")
_ONLY_TF32 = without_effect("number types are as recorded; only tf32 changes them", "tf32")
_OWN_LAYOUT = without_effect("a script lays its tensors out itself (memory_format=torch.channels_last)")
_NO_IMAGES = without_effect("it is the layout of images, and of --model alone")
_NO_SCRIPT = without_effect("it names ranks of a --script")
_STEPS = "predicts training steps and forward passes (inference); leave --mode {value} out"
_TRAINING = "predicts training steps; leave --mode {value} out"
_OF_LIBRARY = refused("it changes the layers of built-in models and of --model-config; leave it out")
_LIBRARY = {BUILT_IN: USED, CONFIGURATION: USED, PARALLEL: USED}
_SEVERAL = {RANKS_OF_SCRIPT: USED, TRACE: USED, PARALLEL: USED, SHARDED: USED}

# fmt: off
TABLE: tuple[OptionRow, ...] = (
    # What is computed.
    OptionRow("--model", "workload.model", _ONE_SOURCE, {
        BUILT_IN: USED, PARALLEL: USED, SHARDED: _OF_DLRM, RANKS_OF_SCRIPT: _SCRIPT_ALONE, RECORDING: _PROFILE_ALONE}),
    OptionRow("--model-config", "workload.model_config", _ONE_SOURCE, {
        CONFIGURATION: USED, PARALLEL: USED, SHARDED: _TABLES_ALONE, RANKS_OF_SCRIPT: _SCRIPT_ALONE,
        RECORDING: _PROFILE_ALONE}),
    OptionRow("--script", "workload.script", _ONE_SOURCE, {
        SCRIPT: USED, RANKS_OF_SCRIPT: USED, SHARDED: _TABLES_ALONE, RECORDING: _PROFILE_ALONE,
        PARALLEL: refused("--parallel is for built-in models; a --script says itself how it is spread")}),
    OptionRow("--trace", "workload.traces", _ONE_SOURCE, {
        TRACE: USED, RECORDING: USED, SHARDED: _TABLES_ALONE, RANKS_OF_SCRIPT: _SCRIPT_ALONE,
        PARALLEL: refused("--parallel is for built-in models; an execution trace is of one rank")}),
    OptionRow("--kineto", "workload.kineto", _PROFILE_ALONE, {RECORDING: USED}),
    OptionRow("--config", "workload.tables", _OF_DLRM, {SHARDED: _TABLES_AND_PLAN, RECORDING: _TABLES_STAY}),
    OptionRow("--batch-size", "workload.batch_size", USED, {TRACE: _RECORDED, RECORDING: _RECORDED}),
    OptionRow("--sequence-length", "workload.sequence_length", USED, {
        TRACE: _RECORDED, RECORDING: _RECORDED, SHARDED: without_effect("DLRM has no sequences")}),
    OptionRow("--document-length", "workload.document_length", _OF_LIBRARY, _LIBRARY),
    OptionRow("--cache-length", "workload.cache_length", _OF_LIBRARY, {
        BUILT_IN: USED, CONFIGURATION: USED,
        PARALLEL: refused("--cache-length is for one GPU yet; leave it out, or --parallel")}),
    OptionRow("--mode", "workload.mode", USED, {
        TRACE: _RECORDED, RECORDING: _RECORDED,
        PARALLEL: refused(f"--parallel {_STEPS}", "inference"), SHARDED: refused(f"--sharding {_TRAINING}")}),
    # How it is computed.
    OptionRow("--recipe", "configuration.recipe", refused(
        "--recipe is for transformers of --model and --model-config; others say themselves what they do"), _LIBRARY),
    OptionRow("--dtype", "configuration.dtype", USED, {TRACE: _ONLY_TF32, RECORDING: _ONLY_TF32}),
    OptionRow("--attention", "configuration.attention", USED, {
        TRACE: _RECORDED, RECORDING: _RECORDED, SHARDED: without_effect("DLRM has no attention")}),
    OptionRow("--stack", "configuration.stack",
              refused("--stack is for transformers of --model and --model-config; others are as they are"),
              {BUILT_IN: USED, CONFIGURATION: USED, PARALLEL: USED}),
    OptionRow("--lora", "configuration.lora",
              refused("--lora is for transformers of --model and --model-config; a script says itself what it trains"),
              {BUILT_IN: USED, CONFIGURATION: USED, PARALLEL: USED}),
    OptionRow("--layout", "configuration.layout", USED, {
        SCRIPT: _OWN_LAYOUT, RANKS_OF_SCRIPT: _OWN_LAYOUT, TRACE: _RECORDED, RECORDING: _RECORDED,
        CONFIGURATION: _NO_IMAGES, PARALLEL: _NO_IMAGES, SHARDED: _NO_IMAGES}),
    OptionRow("--moe", "configuration.mixture", _OF_LIBRARY, _LIBRARY),
    OptionRow("--routing", "configuration.routing", USED, {
        RECORDING: _RECORDED, SHARDED: without_effect("DLRM has no experts")}),
    OptionRow("--precision", "configuration.precision", _OF_LIBRARY, _LIBRARY),
    OptionRow("--linear-attention", "configuration.linear_attention", USED, {
        TRACE: _RECORDED, RECORDING: _RECORDED, SHARDED: without_effect("DLRM has no attention"),
        PARALLEL: refused("--linear-attention is for one GPU and for scripts yet; leave it out")}),
    OptionRow("--optimizer", "configuration.optimizer", USED, {
        TRACE: _RECORDED, RECORDING: _RECORDED}),
    OptionRow("--cuda-graph", "configuration.cuda_graph", USED),
    OptionRow("--compile", "configuration.compiled", USED, {
        SHARDED: refused("--compile is not for --sharding yet; leave it out"),
        RECORDING: refused("--compile: a recorded run was compiled or not; leave it out")}),
    OptionRow("--overheads", "configuration.overheads", USED, {
        RECORDING: refused("--kineto brings its own host overheads; leave --overheads out")}),
    OptionRow("--parallel", "configuration.parallel", refused("--parallel is for built-in models; leave it out"), {
        PARALLEL: USED, SHARDED: _TABLES_ALONE,
        RECORDING: refused("--parallel: a recorded run is spread as it was; leave it out")}),
    OptionRow("--sharding", "configuration.sharding", _TABLES_ALONE, {
        SHARDED: _TABLES_AND_PLAN, RECORDING: _TABLES_STAY}),
    OptionRow("--ranks", "configuration.ranks", refused("--ranks names ranks of a --script on several --gpus"), {
        RANKS_OF_SCRIPT: USED, RECORDING: _RECORDED, PARALLEL: _NO_SCRIPT, SHARDED: _NO_SCRIPT}),
    # On what.
    OptionRow("--gpu", "machine.gpu", needed("give --gpu: a name (`python -m costmodel machines`) or a YAML file"), {
        RECORDING: USED}),
    OptionRow("--gpus", "machine.gpus", refused("{value} GPUs: " + _NOT_SPREAD, 1), _SEVERAL | {
        SHARDED: _TABLES_AND_PLAN,
        RECORDING: refused("--gpus: a recorded run has its own number of ranks; leave it out")}),
    OptionRow("--nodes", "machine.nodes", refused("{value} nodes: " + _NOT_SPREAD, 1), _SEVERAL | {RECORDING: USED}),
    OptionRow("--network", "machine.network",
              refused("--network is for jobs of several nodes; give --parallel and --nodes"),
              _SEVERAL | {RECORDING: USED}),
    OptionRow("--retarget", "machine.retarget", refused("--retarget moves a recorded run; give --kineto and --trace"), {
        RECORDING: USED}),
    OptionRow("--skew", "machine.skew", refused("--skew is for several ranks; give --parallel, or --gpus"), _SEVERAL | {
        RECORDING: refused("--skew: a recorded run has its own; leave it out")}),
    # What of it is changed.
    OptionRow("--what-if", "what_if", USED),
)
# fmt: on


def _several(request: PredictRequest) -> bool:
    """More than one GPU is asked for, or traces of more than one rank are given."""
    from e2e.traces.recorded_run import expand_files

    asked = (request.machine.gpus or 1) > 1 or (request.machine.nodes or 1) > 1
    return asked or len(expand_files(request.workload.traces)) > 1


def _decodes_latents(request: PredictRequest) -> bool:
    return request.configuration.attention == "mla"


def _serves(request: PredictRequest) -> bool:
    return request.configuration.attention in ("mla", "flash3-fp8")


def _trains_in_8_bits(request: PredictRequest) -> bool:
    return request.configuration.attention == "flash3-fp8" and request.workload.mode != "inference"


def _casts_to_serve(request: PredictRequest) -> bool:
    return request.configuration.precision is not None and request.workload.mode == "inference"


_WEIGHTS_STAY = (
    "--precision is how training casts, weights in every pass, and no engine serves so; give --model-config of a "
    "checkpoint whose quantization_config keeps weights in 8 bits, or leave --precision out"
)
_CACHE_OF_FORWARD = "--cache-length decodes: give --mode inference"
_LATENTS_ALONE = "--attention mla decodes on one GPU yet; name another kernel"
_SERVING_KERNELS = "--attention mla and flash3-fp8 are for --model and --model-config; a script calls its own kernels"
_FORWARD_ALONE = "--attention flash3-fp8: it has no gradients in 8 bits; give --mode inference, or name flash3"


def _trains_behind_cache(request: PredictRequest) -> bool:
    return request.workload.cache_length is not None and request.workload.mode != "inference"


PAIR_RULES: tuple[PairRule, ...] = (
    *(
        PairRule(source, "--cache-length without --mode inference", _trains_behind_cache, _CACHE_OF_FORWARD)
        for source in (BUILT_IN, CONFIGURATION)
    ),
    PairRule(PARALLEL, "--attention mla", _decodes_latents, _LATENTS_ALONE),
    *(
        PairRule(source, "--precision with --mode inference", _casts_to_serve, _WEIGHTS_STAY)
        for source in (BUILT_IN, CONFIGURATION, PARALLEL)
    ),
    *(
        PairRule(source, "--attention mla or flash3-fp8", _serves, _SERVING_KERNELS)
        for source in (SCRIPT, RANKS_OF_SCRIPT)
    ),
    *(
        PairRule(source, "--attention flash3-fp8 without --mode inference", _trains_in_8_bits, _FORWARD_ALONE)
        for source in (BUILT_IN, CONFIGURATION, PARALLEL)
    ),
    PairRule(
        TRACE,
        "--skew on one GPU",
        lambda request: request.machine.skew is not None and not _several(request),
        "--skew is for several ranks; give --parallel, or --gpus",
    ),
    PairRule(
        TRACE,
        "--network on one GPU",
        lambda request: request.machine.network is not None and not _several(request),
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
