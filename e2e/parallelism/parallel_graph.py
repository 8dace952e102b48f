"""Entry point of ``--parallel``: the graph of the distinct ranks, from a model, a step and a parallel layout.

Selective recomputation names parts of a layer as Megatron-Core's ``recompute_modules`` does. Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.models.catalog import adamw, mixed_adamw
from e2e.capture.models.stacks import Stack, stack_of
from e2e.parallelism.capture_cache import capture_key, load_or_make
from e2e.parallelism.host_offload import HostSeconds
from e2e.parallelism.pieces import (
    ATTENTIONS,
    CAPTURED_LAYERS,
    FIRST,
    LAST,
    CapturedModel,
    CapturedOptimizer,
    Item,
    LayerCollective,
    ModelSource,
    Name,
    Part,
    Repeats,
    Work,
    capture_model,
    capture_optimizer,
    find_layers,
)
from e2e.parallelism.pipeline import stage_parts
from e2e.parallelism.rewrites import Condenser, added_in_place, beside_products, gathered_in_8_bits
from e2e.parallelism.spec import ParallelSpec, for_inference
from e2e.parallelism.stage import StagePlan, write_stage
from e2e.parallelism.stage_memory import KeptWeights, kept_weights, stage_memory
from e2e.parallelism.stage_writer import StageKernels
from e2e.parallelism.tensor_parallel import ATTENTION, EXPERTS
from e2e.step.execution_graph import CallInfo, ExecutionGraph
from e2e.step.memory import EXPERT_DIMENSIONS, MemoryUsage
from e2e.step.options import StepOptions, recipe_of

GATE = "moe::gate"
_UP_PROJECTIONS = ("q_b_proj", "kv_b_proj")


def recomputed_parts(names: Sequence[str], layers: Any, source: str) -> Repeats:
    """Return the predicate of the parts ``names`` in ``layers``; raise ``InputError`` for a part, other than attention,
    that no layer has.

    ``core_attn``: attention with all operators of its module itself; ``mla_up_proj``: queries, keys and values of
    latents, and their rotation; ``layernorm``: norms between the parts of a layer; ``mlp``: one without experts;
    ``moe_act``: the activation of experts.
    """
    inside = [{name for name, _ in layer.named_modules()} for layer in layers]
    attention = {block for each in inside for block in ATTENTION if block in each}
    dropouts = {f"{block}.{dropout}" for block in attention for dropout in ("attn_dropout", "dropout")}
    projections = {f"{block}.{name}" for block in attention for name in _UP_PROJECTIONS}
    norms = {name for each in inside for name in each if "." not in name and "norm" in name}
    dense = {place for place, each in enumerate(inside) if "mlp" in each and EXPERTS not in each}
    known: dict[str, tuple[bool, Repeats]] = {
        "core_attn": (True, lambda _, module, __: module in attention or module in dropouts),
        "mla_up_proj": (
            any(projections & each for each in inside),
            lambda _, module, name: module in projections or (module in attention and name not in ATTENTIONS),
        ),
        "layernorm": (bool(norms), lambda _, module, __: module in norms),
        "mlp": (bool(dense), lambda place, module, _: place in dense and module.split(".")[0] == "mlp"),
        "moe_act": (any(EXPERTS in each for each in inside), lambda _, __, name: name == GATE),
    }
    for name in names:
        if not known[name][0]:
            raise InputError(f"{source}: recompute-modules={name}: its layers have no such part; leave it out")
    chosen = [known[name][1] for name in names]
    return lambda place, module, name: any(each(place, module, name) for each in chosen)


ModelChange = Callable[[tuple[Item, ...], Mapping[int, CallInfo]], tuple[Item, ...]]
# Above this number, pricing and simulating kernel by kernel takes more than about 20 s of CPU.
MANY_KERNELS = 100_000
# Configuration keys of the number of layers.
LAYER_KEYS = ("n_layer", "num_hidden_layers")
# Configuration key of the number of leading layers without experts.
DENSE_KEY = "first_k_dense_replace"
UNCUT_TYPES = ("switch_transformers", "t5")


@dataclass(frozen=True)
class ParallelGraph:
    """Graph of a parallel step."""

    # Without prices, one rank per pipeline stage, each representing ``multiplicity`` identical ranks.
    graph: ExecutionGraph
    # Rank of the graph -> its peak.
    memory: Mapping[int, MemoryUsage]
    # Sequences processed by all ranks together in a step.
    samples: int
    warnings: tuple[str, ...] = field(default=())
    # Tokens of each sequence (0: unknown).
    sequence_length: int = 0


def build_parallel_graph(
    model: str | Path,
    spec: ParallelSpec,
    step: StepOptions | None = None,
    *,
    captures: Path | None = None,
    condenser: Condenser | None = None,
    node_gpus: int | None = None,
    host_bandwidth: float | None = None,
) -> ParallelGraph:
    """Build the step of ``model`` with the layout ``spec``, for :func:`e2e.explain.predictor.predict_graph`.

    ``model``: name of a built-in transformer (``gpt3-xl``) or path of a Hugging Face configuration. Ranks are numbered
    as in Megatron-LM: tensor-parallel neighbours first, then context-parallel ones, replicas and stages, so that
    tensor-parallel groups lie inside a node. Collectives are tasks without a price whose ``ranks`` are the global ranks
    of the group. Raise ``InputError`` for an unknown model and for sizes that do not divide evenly (layers by stages,
    heads by ``tp``, tokens by ``cp``).

    ``captures``: folder of the cache of captured layers. ``condenser``: merges runs of kernels into tasks in a step of
    more than :data:`MANY_KERNELS` kernels, longer runs for more kernels; a warning says so. ``node_gpus``: GPUs of one
    node, for dispatch once per node. ``host_bandwidth``: bytes/s of host memory for each GPU, for an optimizer state on
    the host.
    """
    step = step or StepOptions()
    config, name = configuration(model)
    if spec.clip is None and not step.inference:
        spec = replace(spec, clip=stack_of(step.stack).clips)
    if step.inference:
        spec = for_inference(spec)
        if step.lora is not None:
            raise InputError(f"{name}: --lora trains adapters; leave it out with --mode inference")
        if config.get("quantization_config"):
            raise InputError(
                f"{name}: weights that its quantization_config keeps in 8 bits are for one GPU yet; leave --parallel "
                "out, or remove it to predict the model in 16 bits"
            )
    if spec.master_weights and step.dtype not in ("bfloat16", "float16"):
        raise InputError(f"{name}: master-weights=yes is for 16-bit parameters; give --dtype bfloat16 or float16")

    _check_offload(spec, step, name, host_bandwidth)

    node_ranks, samples = _node_ranks(spec, node_gpus), step.batch_size or 1

    def capture() -> tuple[CapturedModel, int, StepOptions, int]:
        source, layers, options = _source(config, name, spec, step, node_ranks)
        found = capture_model(source, options, stack_of(step.stack).ends_compiled)
        _check_context(found, config, name, spec)
        return found, layers, options, source.boundary_shape[1] * spec.cp

    key = (
        ""
        if captures is None
        else capture_key({"config": config, "step": vars(step), "inside": _inside(spec), "node": node_ranks})
    )
    captured, layers, options, length = load_or_make(captures, key, capture)
    stack = stack_of(step.stack)
    host = HostSeconds()
    if spec.offloaded_state and host_bandwidth:
        whole = spec.sharing == 3 and not stack.shards_stay  # PyTorch's own optimizer; others have fused ones
        clipped = spec.sharing == 3 and stack.shards_stay and bool(spec.clip)
        host = HostSeconds.of(host_bandwidth, stack.fused_optimizer or not whole, returned=not whole, clipped=clipped)
    captured = _run_by(captured, stack, spec)
    recipe = recipe_of(step.precision, step.dtype)
    if recipe is not None and recipe.weights_kept and spec.sequence_parallel:  # Transformer Engine's
        captured = replace(
            captured, pieces=captured.pieces.with_items(lambda items: gathered_in_8_bits(items, spec.tp))
        )
    if spec.tp_overlap:
        captured = replace(captured, pieces=beside_products(captured.pieces, spec.tp))
    keeping = kept_weights(spec, captured.dtype.itemsize, stack)
    optimizer = mixed_adamw if spec.master_weights and not keeping.own_masters else adamw
    kernels = count_kernels(captured, spec, layers)
    if condenser is None or kernels <= MANY_KERNELS:
        built = assemble(
            captured, spec, layers, samples, optimizer, options, name, keeping=keeping, node_ranks=node_ranks,
            host=host,
        )  # fmt: skip
        return replace(built, sequence_length=length)
    condenser = replace(condenser, kernels=max(condenser.kernels, kernels // MANY_KERNELS))
    shortened = replace(captured, pieces=condenser.pieces(captured.pieces))
    built = assemble(
        shortened, spec, layers, samples, optimizer, options, name, condenser.items, keeping,
        node_ranks=node_ranks, host=host,
    )  # fmt: skip
    note = f"about {kernels:,} kernels in the step of all stages: simulated in runs of {condenser.kernels}"
    return replace(built, sequence_length=length, warnings=(*built.warnings, note))


def _run_by(captured: CapturedModel, stack: Stack, spec: ParallelSpec) -> CapturedModel:
    """Return ``captured`` with the recomputation and gradient accumulation of ``stack``."""
    pieces = captured.pieces
    if not stack.stops_early:
        pieces = replace(pieces, needed=pieces.forward)
    if stack.accumulates:
        size = captured.dtype.itemsize
        pieces = added_in_place(pieces, size, StageKernels(spec, size).reduced_dtype)
    return replace(captured, pieces=pieces)


def _node_ranks(spec: ParallelSpec, node_gpus: int | None) -> int | None:
    """Return the number of expert-parallel ranks in one node, or None if all are in one node or it is not needed."""
    if node_gpus is None or spec.dispatch == "alltoall" or spec.expert_set <= node_gpus:
        return None
    inside = max(node_gpus // spec.expert_tensor, 1)
    return inside if spec.ep % inside == 0 else None


def _inside(spec: ParallelSpec) -> tuple[Any, ...]:
    """Return the fields of ``spec`` that change a rank's layers."""
    tokens = spec.tp, spec.sequence_parallel, spec.cp, spec.context_form, spec.micro_batches
    return *tokens, spec.recompute_modules, spec.ep, spec.expert_tensor, spec.dispatch


def count_kernels(captured: CapturedModel, spec: ParallelSpec, layers: int) -> int:
    """Count the kernels in the passes of all stages, without communication and optimizer."""
    pieces = captured.pieces
    again = pieces.again(spec.recompute)

    def works(*parts: Part | None) -> int:
        return sum(isinstance(item, Work) for part in parts if part is not None for item in part.items)

    if spec.inference:
        ends = works(pieces.forward[FIRST], pieces.forward[LAST])
        return spec.micro_batches * (layers * works(pieces.forward[1]) + ends)
    inner = works(pieces.forward[1], pieces.accumulate[1], again.get(1))
    ends = works(*(each[name] for each in (pieces.forward, pieces.accumulate) for name in (FIRST, LAST)))
    return spec.micro_batches * (layers * inner + ends)


def assemble(
    captured: CapturedModel,
    spec: ParallelSpec,
    layers: int,
    batch_size: int,
    optimizer: CapturedOptimizer,
    options: StepOptions,
    name: str,
    change: ModelChange | None = None,
    keeping: KeptWeights | None = None,
    *,
    node_ranks: int | None = None,
    host: HostSeconds | None = None,
) -> ParallelGraph:
    """Build the graph of a model of ``layers`` layers from its captured parts.

    ``change``: rewrites the items of the optimizer, as done before with those of ``captured``. ``keeping``: types of
    the stored weights, gradients and state (None: as :func:`kept_weights` without a stack). ``node_ranks``:
    expert-parallel ranks in one node. ``host``: speed of the host.
    """
    keeping = keeping or kept_weights(spec, captured.dtype.itemsize)
    counts = layer_counts(spec, layers, name)
    dtype = torch.float32 if keeping.own_masters else captured.dtype
    makers = _Optimizers(captured, spec, optimizer, options, change, dtype)
    plans = [
        replace(
            _plan(captured, spec, counts, stage, makers),
            node_ranks=node_ranks,
            host=host or HostSeconds(),
            keeps_last=keeping.keeps_last,
            accumulates=keeping.accumulates,
            shards_stay=keeping.shards_stay,
        )
        for stage in range(spec.pp)
    ]
    ranks = tuple(write_stage(plan) for plan in plans)
    alike = spec.contributors * spec.tp
    graph = ExecutionGraph(ranks, {rank.rank: alike for rank in ranks}, source=name)
    memory = {rank.rank: stage_memory(plan, keeping) for rank, plan in zip(ranks, plans, strict=True)}
    samples = batch_size * spec.micro_batches * spec.replicas
    return ParallelGraph(graph, memory, samples)


@dataclass
class _Optimizers:
    """Optimizers of the stages; stages with the same parameters share one capture."""

    captured: CapturedModel
    spec: ParallelSpec
    optimizer: CapturedOptimizer
    options: StepOptions
    change: ModelChange | None
    dtype: torch.dtype
    known: dict[Any, tuple[tuple[Item, ...], Mapping[int, CallInfo], int]] = field(default_factory=dict)

    def of(self, shapes: list[tuple[int, ...]]) -> tuple[tuple[Item, ...], Mapping[int, CallInfo], int]:
        """Return items, all calls including those of the captured parts, and the bytes of temporary tensors."""
        if self.spec.offloaded_state == 1.0:
            return (), self.captured.pieces.calls, 0
        key = tuple(shapes)
        if key not in self.known:
            calls = dict(self.captured.pieces.calls)
            owned = _left_on_gpu(_shares(shapes, self.spec), self.spec)
            items, needed = capture_optimizer(owned, self.dtype, self.optimizer, self.options, calls)
            self.known[key] = (items if self.change is None else self.change(items, calls)), calls, needed
        return self.known[key]


def _plan(
    captured: CapturedModel, spec: ParallelSpec, counts: Sequence[int], stage: int, optimizers: _Optimizers
) -> StagePlan:
    chunks = tuple(part_names(counts, part) for part in stage_parts(spec, stage))
    layers = sum(counts)
    element = captured.dtype.itemsize
    shapes = dict(captured.shapes)
    if spec.pp > 1 and captured.tied is not None:
        shapes[LAST] = [*shapes[LAST], captured.tied]  # the last stage holds a copy of the word embedding
    parameters = {name: tuple(prod(shape) * element for shape in each) for name, each in shapes.items()}
    trained = captured.trained or shapes
    owned = [shape for chunk in chunks for name in chunk for shape in trained[captured.pieces.captured(name, layers)]]
    items, calls, needed = optimizers.of(owned)
    pieces = replace(captured.pieces, calls=calls)
    tied = prod(captured.tied) * element if captured.tied is not None else 0
    boundary = captured.boundary_bytes // (spec.tp if spec.sequence_parallel else 1)
    experts = {
        name: sum(prod(shape) * element for shape in each if _of_experts(shape, spec)) for name, each in shapes.items()
    }
    frozen = {
        name: sum(parameters[name]) - sum(prod(shape) * element for shape in trained[name]) for name in parameters
    }
    if captured.trained is None:
        frozen = {}
    return StagePlan(
        spec, stage, layers, pieces, chunks, parameters, element, boundary, tied, items, needed, experts, frozen
    )


def layer_counts(spec: ParallelSpec, layers: int, name: str) -> tuple[int, ...]:
    """Return the layers of each part of the model ``name``; raise ``InputError`` if they do not divide evenly."""
    given = {0: spec.first_layers, spec.stages - 1: spec.last_layers}
    ends = {part: count for part, count in given.items() if count is not None}
    rest, parts = layers - sum(ends.values()), spec.stages - len(ends)
    fits = rest > 0 and rest % parts == 0 if parts else rest == 0
    if not fits:
        besides = f" besides {' and '.join(map(str, ends.values()))} at the ends" if ends else ""
        raise InputError(
            f"{name}: {layers} layers do not divide into {spec.stages} parts (pp x virtual-stages){besides}; "
            "first-layers and last-layers give the first and the last part another number"
        )
    return tuple(ends.get(part, rest // parts if parts else 0) for part in range(spec.stages))


def part_names(counts: Sequence[int], part: int) -> tuple[Name, ...]:
    """Return the names of the contents of part ``part`` of a model whose parts have ``counts`` layers."""
    begin = sum(counts[:part])
    names: list[Name] = [FIRST] if part == 0 else []
    names += range(begin, begin + counts[part])
    return (*names, LAST) if part == len(counts) - 1 else tuple(names)


def _shares(shapes: list[tuple[int, ...]], spec: ParallelSpec) -> list[tuple[int, ...]]:
    """Return the shares of parameters that a rank updates: FSDP2 splits each along its first dimension, ZeRO 1 and 2
    split all together.
    """
    if not spec.sharing:
        return shapes
    families = [
        ([shape for shape in shapes if _of_experts(shape, spec) == experts], shards)
        for experts, shards in ((False, spec.shards), (True, spec.expert_shards))
    ]
    if spec.sharing == 3:
        return [(-(-shape[0] // shards), *shape[1:]) for each, shards in families for shape in each]
    return [(-(-sum(prod(shape) for shape in each) // shards),) for each, shards in families if each]


def _left_on_gpu(shapes: list[tuple[int, ...]], spec: ParallelSpec) -> list[tuple[int, ...]]:
    """Return the parameters updated on the GPU, if the host updates the rest."""
    if not spec.offloaded_state:
        return shapes
    return [(max(round(shape[0] * (1.0 - spec.offloaded_state)), 1), *shape[1:]) for shape in shapes]


def _check_offload(spec: ParallelSpec, step: StepOptions, name: str, host_bandwidth: float | None) -> None:
    """Raise ``InputError`` if the optimizer cannot be offloaded to the host."""
    if not spec.offloaded_state:
        return
    if step.dtype in ("bfloat16", "float16") and not spec.master_weights:
        raise InputError(f"{name}: offload-optimizer updates FP32 weights on the host; add master-weights=yes")
    if host_bandwidth is None:
        raise InputError(
            f"{name}: offload-optimizer: how fast the host's memory is, is not known of this machine; give a cluster "
            "(--gpu dgx-h100), or a cluster file of your own with host_memory"
        )


def _of_experts(shape: tuple[int, ...], spec: ParallelSpec) -> bool:
    """True if these parameters are experts held by other ranks than the rest."""
    return spec.experts_apart and len(shape) == EXPERT_DIMENSIONS


def configuration(model: str | Path) -> tuple[dict[str, Any], str]:
    """Return Hugging Face configuration and name of a built-in transformer or a file; raise ``InputError`` for any
    other.
    """
    from e2e.capture.models.catalog import known_models, unknown_model
    from e2e.capture.models.configurations import PRESETS
    from e2e.capture.models.transformer import read_config

    if isinstance(model, str) and model in PRESETS:
        return dict(PRESETS[model]), model
    if isinstance(model, Path) or Path(model).suffix == ".json":
        return read_config(Path(model)), str(model)
    if model in known_models():
        raise InputError(f"model {model!r} is no transformer; --parallel spreads transformers (or give --script)")
    raise unknown_model(model, sorted(PRESETS))


def _source(
    config: dict[str, Any], name: str, spec: ParallelSpec, step: StepOptions, node_ranks: int | None
) -> tuple[ModelSource, int, StepOptions]:
    """Return the model of few layers on one rank, with its share of layers and tokens, its real number of layers, and
    the options.
    """
    import e2e.parallelism.context_parallel as context_parallel
    import e2e.parallelism.expert_parallel as expert_parallel
    import e2e.parallelism.tensor_parallel as tensor_parallel
    from e2e.capture.attention import pack_documents
    from e2e.capture.models import transformer
    from e2e.capture.models.catalog import TORCH_DTYPES
    from e2e.capture.models.layer_forms import add_adapters, apply_forms
    from e2e.capture.models.stacks import apply_stack

    if config["model_type"] in UNCUT_TYPES:
        raise InputError(f"{name}: layers of model type {config['model_type']!r} are not alike; --parallel needs that")
    stack, samples = stack_of(step.stack), step.batch_size or 1
    # Training mode also for inference, since gradients mark the borders of the parts.
    options = replace(step, mode="train", optimizer=step.optimizer or stack.optimizer_form, attention=step.form)
    attention = transformer.library_form(step.form)
    layers = layer_count(config, name)
    few = {key: _of_few_layers(value, layers) for key, value in config.items() if key not in LAYER_KEYS}
    few[layer_key(config)] = CAPTURED_LAYERS
    model = transformer.build_transformer(few, attention, name)
    dense = _leading_dense(model.config, layers, name)
    if dense:
        model = transformer.build_transformer({**few, DENSE_KEY: 1}, attention, name)
    whole = transformer.sequence_length(model.config.to_dict(), step.sequence_length, name)
    if spec.cp > 1 and whole % (2 * spec.cp):
        pieces = f"the sequence length {whole} does not divide into {2 * spec.cp} pieces; choose one that does"
        raise InputError(f"{name}: cp={spec.cp}: {pieces}")
    length = whole // spec.cp
    if stack.loss == "chunked" and spec.tp > 1:
        raise InputError(f"{name}: --stack {step.stack}: its loss is not split over ranks; use tp=1")
    if step.lora is not None and (spec.tp > 1 or spec.pp > 1):
        raise InputError(f"{name}: --lora {step.lora}: adapters are not split over ranks; use tp=1 and pp=1")
    if step.document_length is not None:
        if spec.cp > 1:
            raise InputError(f"{name}: --document-length {step.document_length}: ranks share whole sequences; use cp=1")
        pack_documents(model, attention, step.document_length, name)
    apply_stack(model, stack, name)
    apply_forms(model, config, options, name, spec.micro_batches)
    if step.lora is not None:
        add_adapters(model, step.lora, name)
    found = find_layers(model, name, dense > 0)
    if spec.sequence_parallel and length % spec.tp:
        of = "the sequence length" if spec.cp == 1 else "a context-parallel rank's part of the sequence,"
        raise InputError(f"{name}: sp=yes: tp={spec.tp} does not divide {of} {length}; choose a length that it does")
    if spec.tp > 1:
        whole = spec.expert_tensor < spec.tp
        tensor_parallel.shard(model, found, spec.tp, bool(spec.sequence_parallel), name, whole, stack.loss_parallel)
    if spec.cp > 1:
        context_parallel.split_attention(model, spec.cp, attention, spec.context_form)
    if spec.ep > 1:
        exchange = expert_parallel.Exchange(spec.ep, spec.dispatch, step.routing, node_ranks)
        expert_parallel.divide(model, found, exchange, name)
    model.to(TORCH_DTYPES[step.dtype])
    model.train(not step.inference)
    advice = "use tp=1, its layers cannot be split" if spec.tp > 1 else "correct its configuration"
    forward = transformer.forward_call(model, samples, length, not step.inference, name, advice)
    shape = (samples, length, model.config.hidden_size)
    again = recomputed_parts(spec.recompute_modules.split("+"), found, name)
    return ModelSource(name, model, found, forward, shape, again, max(dense, 1)), layers, options


def _leading_dense(config: Any, layers: int, name: str) -> int:
    """Return the number of leading layers with an MLP instead of experts; raise ``InputError`` if there are others
    elsewhere.
    """
    dense = int(getattr(config, DENSE_KEY, 0) or 0)
    elsewhere = [key for key in ("mlp_only_layers", "moe_layer_start_index") if getattr(config, key, None)]
    if elsewhere or dense >= layers:
        key = elsewhere[0] if elsewhere else DENSE_KEY
        raise InputError(
            f"{name}: {key}={getattr(config, key)}: --parallel takes dense layers at the front alone; give a --script"
        )
    return dense


def _check_context(captured: CapturedModel, config: Mapping[str, Any], name: str, spec: ParallelSpec) -> None:
    """Raise ``InputError`` if attention was not split, since it does not use the library's table of attention
    functions.
    """
    inside = (item for item in captured.pieces.forward[1].items if isinstance(item, LayerCollective))
    if spec.cp > 1 and not any(item.group == "cp" for item in inside):
        kind = config["model_type"]
        raise InputError(f"{name}: cp={spec.cp}: the attention of model type {kind!r} cannot be split; use cp=1")


def _of_few_layers(value: Any, layers: int) -> Any:
    """Shorten a list with an entry per layer (``layer_types``) to the captured layers."""
    return value[:CAPTURED_LAYERS] if isinstance(value, list) and len(value) == layers else value


def layer_key(config: Mapping[str, Any]) -> str:
    """Return the key of the number of layers in ``config``."""
    return "n_layer" if config["model_type"] in ("gpt2", "xlnet") else "num_hidden_layers"


def layer_count(config: Mapping[str, Any], name: str) -> int:
    """Return the number of layers of the configuration, or the default of the library's class."""
    for key in LAYER_KEYS:
        if isinstance(config.get(key), int):
            return int(config[key])
    import transformers

    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if config["model_type"] not in known:
        raise InputError(
            f"{name}: model_type {config['model_type']!r} is not known to transformers; correct it, or give a --script"
        )
    return int(known[config["model_type"]]().num_hidden_layers)
