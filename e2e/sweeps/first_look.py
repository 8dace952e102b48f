"""Quick estimate of the memory (lower bound) and time of a way to spread a model, in microseconds instead of seconds.

The estimate selects what a sweep predicts: a way whose weights, states and layer inputs alone exceed the memory cannot
fit, and of the rest the most promising are predicted first. The estimates are never reported. ``--gpus`` without
``--parallel`` takes the fastest predicted one of the promising ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from costmodel.base.errors import InputError
from costmodel.gpu.families.rates import dense_peak
from costmodel.machines.cluster import Cluster, load_cluster
from e2e.parallelism.spec import ParallelSpec, text_of
from e2e.sources.predict_request import predict_request
from e2e.sources.recipes import TrainingRecipe, training_recipe
from e2e.sources.requests import SpreadModel
from e2e.step.memory import EXPERT_DIMENSIONS
from e2e.step.memory_room import memory_room, verdict
from e2e.step.options import Dtype
from e2e.sweeps.sweep_space import EXPERT_KEYS, LONGEST_DEFAULT, SweepCell, SweepRequest, cells_of, experts_of

# Share of the datasheet's rate reached by large products and attention of a training step, as in published steps.
_REACHED = 0.65
# Relative extra work for each doubling of the tensor-parallel or context-parallel ranks: smaller products, and
# transfers of keys and values.
_SMALLER = 0.04
# Ratio to the best estimate above which a kind of ways is slower beyond the error of the estimates.
_MUCH_SLOWER = 1.5
# Bytes of activations per token and layer, in units of the widths of the model and of its inner layer: 16 bits, fused
# attention (Korthikanti et al., arXiv 2205.05198, without the terms of scores and dropout).
_KEPT_WIDTHS, _KEPT_INNER = 16.0, 6.0


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model."""

    layers: int
    # Parameters of a layer.
    layer: int
    # Parameters of a layer's experts; `used`: the share of them that a token uses.
    experts: int
    used: float
    # Parameters before and after the layers.
    ends: int
    # Features of a token; `inner`: inside a layer.
    width: int
    inner: int

    @staticmethod
    def of(config: dict[str, Any], name: str) -> ModelSizes:
        """Count the sizes of a Hugging Face configuration.

        Models of one and two layers are built for that, without allocating weights.
        """
        from e2e.capture.models.transformer import build_transformer
        from e2e.parallelism.parallel_graph import LAYER_KEYS, layer_count, layer_key

        few = {key: value for key, value in config.items() if key not in (*LAYER_KEYS, "layer_types")}
        if "first_k_dense_replace" in few:
            few["first_k_dense_replace"] = 0
        one, two = (build_transformer({**few, layer_key(config): count}, "eager", name) for count in (1, 2))
        layer = _parameters(two) - _parameters(one)
        experts = _parameters(two, experts=True) - _parameters(one, experts=True)
        settings = one.config.to_dict()  # type: ignore[union-attr, operator]
        there = next((settings[key] for key in EXPERT_KEYS if isinstance(settings.get(key), int)), 0)
        chosen = settings.get("num_experts_per_tok") or 1
        width = int(settings.get("hidden_size") or settings.get("n_embd") or 1)
        inner = int(settings.get("intermediate_size") or settings.get("n_inner") or 4 * width)
        return ModelSizes(
            layer_count(config, name), layer, experts, chosen / there if there else 1.0,
            _parameters(one) - layer, width, inner,
        )  # fmt: skip

    @property
    def multiplied(self) -> float:
        """Number of parameters by which a token is multiplied."""
        return self.layers * (self.layer - self.experts * (1.0 - self.used)) + self.ends / 2


def _parameters(model: Any, experts: bool = False) -> int:
    return sum(each.numel() for each in model.parameters() if not experts or each.dim() == EXPERT_DIMENSIONS)


@dataclass(frozen=True)
class FirstLook:
    """Quick estimate: approximate ``seconds`` of one sample, least ``bytes`` of a rank."""

    seconds: float
    bytes: float


def first_look(
    sizes: ModelSizes,
    spec: ParallelSpec,
    batch_size: int,
    length: int,
    cluster: Cluster,
    recipe: str | None = None,
    dtype: Dtype | None = None,
) -> FirstLook:
    """Estimate ``spec`` with micro-batches of ``batch_size`` sequences of ``length`` tokens."""
    asked, narrow = training_recipe(recipe), dtype not in ("float32", "tf32")
    element = 2 if narrow else 4
    parameters = _held(sizes, spec)
    state = _state_bytes(spec, asked, narrow, element) * parameters
    tokens = batch_size * length / (spec.cp * spec.tp)
    kept = tokens * element * sizes.layers / spec.pp * min(spec.pp, spec.micro_batches)
    needed = state + kept * sizes.width
    whole = state + kept * (_KEPT_WIDTHS * sizes.width + _KEPT_INNER * sizes.inner) / 2
    fits = verdict(int(whole), memory_room(cluster.machine)) != "does not fit"
    again = 4 / 3 if not fits or spec.recompute == "full" else 1.0
    return FirstLook(_seconds(sizes, spec, batch_size, length, cluster, parameters, again, element), needed)


def _held(sizes: ModelSizes, spec: ParallelSpec) -> float:
    """Number of parameters of a rank before any sharding of data parallelism."""
    dense = sizes.layers * (sizes.layer - sizes.experts) / spec.pp + sizes.ends / max(1, min(spec.pp, 2))
    return dense / spec.tp + sizes.layers * sizes.experts / spec.pp / max(spec.ep, 1) / spec.expert_tensor


def _state_bytes(spec: ParallelSpec, recipe: TrainingRecipe, narrow: bool, element: int) -> float:
    """Bytes per parameter: weight, gradient, states of AdamW."""
    masters = narrow and recipe.master_weights if spec.master_weights is None else spec.master_weights
    state = 12.0 if masters else 2.0 * element
    gradient = 4.0 if recipe.stack == "megatron" else element
    if spec.sharing == 3:
        return (16.0 if masters else 4.0 * element) / spec.shards
    return element + gradient / (spec.shards if spec.sharing == 2 else 1) + state / spec.shards


def _seconds(
    sizes: ModelSizes, spec: ParallelSpec, batch_size: int, length: int, cluster: Cluster, parameters: float,
    again: float, element: int,
) -> float:  # fmt: skip
    """Approximate seconds per sample, over all samples that the job processes at once."""
    machine, passes = cluster.machine, spec.micro_batches
    rate = dense_peak(machine, "bfloat16" if element == 2 else "float32") or dense_peak(machine, "float16") or 1e14
    flops = 6 * sizes.multiplied + 12 * sizes.layers * sizes.width * length
    inside = spec.tp * spec.pp * spec.cp
    one = flops * batch_size * length / inside / (rate * _REACHED) * again * (1 + _SMALLER * log2(spec.tp * spec.cp))
    near = cluster.intra_node.bandwidth * cluster.usable_share(cluster.gpus_per_node)
    far = cluster.node_bandwidth() / cluster.gpus_per_node if cluster.nodes > 1 else near
    boundary = batch_size * length / spec.cp * sizes.width * element
    if spec.tp > 1:
        one += 8 * sizes.layers / spec.pp * boundary * (spec.tp - 1) / spec.tp / near / 2
    if spec.ep > 1:
        one += 4 * sizes.layers / spec.pp * boundary / far
    # Replicas of a node share its network cards: a ring through all of them enters and leaves by each card.
    beside = max(cluster.gpus_per_node // spec.tp, 1)
    link = near if spec.world_size <= cluster.gpus_per_node else min(near, far * beside)
    weights = parameters * element
    if spec.sharing == 3:
        one += max(3 * weights / link - one, 0.1 * weights / link)
    bubble = (spec.pp - 1) / (passes * spec.virtual_stages)
    whole = one * passes * (1 + bubble)
    if spec.contributors > 1 and spec.sharing != 3:
        whole += max(2 * weights / link - 0.5 * one, 0.0)
    return whole / (batch_size * passes * spec.replicas)


@dataclass(frozen=True)
class Promising:
    """Selected ``cells``; of the other generated ways ``too_large`` cannot fit, and ``left`` look slower."""

    cells: tuple[SweepCell, ...]
    too_large: int
    left: int


def promising_cells(request: SweepRequest, cells: Sequence[SweepCell], most: int) -> Promising:
    """Select ``most`` cells of ``auto`` for every GPU and number of GPUs, in the order of :func:`_in_order`.

    All other cells are kept.
    """
    from e2e.parallelism.parallel_graph import configuration

    made = [cell for cell in cells if cell.recompute]
    if not made:
        return Promising(tuple(cells), 0, 0)
    sizes = ModelSizes.of(*configuration(request.model))
    length = request.sequence_length or LONGEST_DEFAULT
    looks: dict[tuple[str, int], list[tuple[float, int, SweepCell]]] = {}
    clusters: dict[tuple[str, int], Cluster] = {}
    too_large = 0
    for place, cell in enumerate(made):
        where = cell.gpu, cell.gpus
        if where not in clusters:
            clusters[where] = load_cluster(cell.gpu, cell.gpus, network=request.network)
            looks[where] = []
        cluster, recipe = clusters[where], cell.recipe or request.recipe
        look = first_look(
            sizes, cell.parallel, cell.batch_size or request.samples, length, cluster, recipe, request.dtype
        )
        if verdict(int(look.bytes), memory_room(cluster.machine)) == "does not fit":
            too_large += 1
        else:
            looks[where].append((look.seconds, place, cell))
    chosen = [cell for each in looks.values() for cell in _in_order(each)[:most]]
    others = [cell for cell in cells if not cell.recompute]
    return Promising((*others, *chosen), too_large, len(made) - too_large - len(chosen))


def _in_order(looks: Sequence[tuple[float, int, SweepCell]]) -> list[SweepCell]:
    """Order cells: first the best estimate of every kind, then the others by their estimates.

    Kinds are with and without tensor, pipeline and context parallelism; estimates are too rough to compare kinds,
    unless one is much slower. Of cells that differ only in the parts of an interleaved pipeline the best one counts.
    """
    ranked, kinds, seen = sorted(looks, key=lambda each: each[:2]), set(), set()
    order: list[tuple[int, float, int, SweepCell]] = []
    for seconds, place, cell in ranked:
        spec = cell.parallel
        kind = spec.tp > 1, spec.pp > 1, spec.cp > 1
        whole = replace(spec, virtual_stages=1, first_layers=None, last_layers=None)
        alike = replace(cell, parallel=whole)
        turn = 2 if alike in seen else 1
        if kind not in kinds and seconds <= _MUCH_SLOWER * ranked[0][0]:
            turn = 0
        kinds.add(kind)
        seen.add(alike)
        order.append((turn, seconds, place, cell))
    return [cell for *_, cell in sorted(order, key=lambda each: each[:3])]


# Number of predicted ways: each takes seconds.
TRIES = 4


def with_best_way(request: SpreadModel) -> tuple[SpreadModel, str]:
    """Return ``request`` with the way that was found, and a note on it.

    Raises ``InputError`` if none fits, and for models other than transformers and for inference, which are not
    searched.
    """
    from e2e.parallelism.parallel_graph import configuration, layer_count

    gpus = request.gpus or 1
    if gpus == 1 or request.mode != "train" or not request.has_sequences:
        several = f"{gpus} GPUs" if gpus > 1 else f"{request.nodes} nodes"
        raise InputError(
            f"{several}: say how the work is spread, such as --parallel dp=8 or --parallel fsdp=8 (a --script says it "
            "itself, with --gpus)"
        )
    config, name = configuration(request.named)
    question = SweepRequest(
        str(request.named), request.samples, None, request.sequence_length, request.dtype, request.attention,
        request.network, experts_of(config), request.recipe, request.stack, layers=layer_count(config, name),
    )  # fmt: skip
    looked = promising_cells(question, cells_of(question, [request.gpu], [gpus], ["auto"]), TRIES)
    found: list[tuple[bool, float, SpreadModel, str]] = []  # (may not fit, rate, request, way)
    reason = f"all {looked.too_large} ways take more memory than there is"
    for cell in looked.cells:
        for spec in cell.specs():
            other = replace(request, parallel=spec, what_if=())
            try:
                step = predict_request(other).prediction
            except InputError as error:
                reason = str(error)
                break
            if step.fits is not False and step.throughput is not None:
                rate = step.throughput.tokens_per_second_per_gpu or 0.0
                found.append((step.fits is None, rate, replace(other, what_if=request.what_if), text_of(spec)))
            if step.fits:
                break
            reason = step.memory_shortage or reason
    if not found:
        raise InputError(f"--gpus {gpus}: no way to spread {name} was found ({reason}); give --parallel")
    (_, rate, best, way), *rest = sorted(found, key=lambda each: (each[0], -each[1]))
    total = len(looked.cells) + looked.left + looked.too_large
    line = f"--parallel {way}: the fastest of {len(found)} predicted of {total} ways, {rate:,.0f} tokens/s/GPU"
    if rest:
        line += f"; next: {rest[0][3]}, {rest[0][1]:,.0f}" + (" (may not fit)" if rest[0][0] else "")
    return best, f"{line} (`sweep --parallel auto` tries more)"
