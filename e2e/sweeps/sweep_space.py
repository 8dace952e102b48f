"""Search space of a sweep: machines x numbers of GPUs x ways to spread a model.

``auto`` enumerates tensor-parallel degrees inside a node, ranks that share long sequences (``cp``), pipeline stages
with one or several parts of the model each, and for the rest replicas that average gradients (``dp``), share the
optimizer's state (``zero=1``) or everything (``fsdp``), experts whole or divided as far as a node allows (``ep``), with
as little recomputation as the memory allows; with a global batch, several sizes of micro-batches. Sequence parallelism
and overlap are the recipe's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from costmodel.machines.cluster import load_cluster
from e2e.parallelism.spec import ParallelSpec, Recompute, read_parallel
from e2e.sources.recipes import training_recipe
from e2e.step.options import AttentionForm, Dtype, Precision

# Micro-batches per pipeline stage without a global batch: the bubble is then at most a fifth of a step.
MICRO_BATCHES_PER_STAGE = 4
# Sizes of micro-batches that `auto` tries if a global batch and no size is given.
MICRO_BATCH_SIZES = (1, 2, 4)
# Recomputation, in ascending order.
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "operators", "full")
# Most parts of the model tried on each stage of an interleaved pipeline; if the layers do not divide evenly, powers of
# two with shorter ends.
MOST_VIRTUAL_STAGES = 8
# Least tokens of a sequence on a rank if ranks share it, as in published jobs of 405B at 8,192: shorter sequences fit
# without sharing.
TOKENS_OF_A_RANK = 4096
# Default tokens of a sequence, as in e2e.capture.models.transformer (which imports torch).
LONGEST_DEFAULT = 4096
# Keys of the number of experts in configurations.
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class SweepRequest:
    """Model and step of a sweep; fields without a comment are as in ``predict``."""

    model: str
    # Sequences of one micro-batch on one replica; `None`: 1, or the best size if a global batch is given.
    batch_size: int | None = None
    # Sequences of all replicas in a step; `None`: determined by the micro-batches.
    global_batch: int | None = None
    sequence_length: int | None = None
    dtype: Dtype | None = None
    attention: AttentionForm | None = None
    # Network as for `costmodel.machines.cluster.load_cluster`.
    network: str | None = None
    # Number of experts of a layer, 0 without experts.
    experts: int = 0
    recipe: str | None = None
    stack: str | None = None
    precision: Precision | None = None
    compiled: bool = False
    # Number of layers of the model, 0 if unknown.
    layers: int = 0

    @property
    def samples(self) -> int:
        """Sequences of a micro-batch for cells without a size of their own."""
        return self.batch_size or 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of micro-batches to try."""
        open_size = self.batch_size is None and self.global_batch is not None
        return MICRO_BATCH_SIZES if open_size else (self.samples,)


@dataclass(frozen=True)
class SweepCell:
    """One cell of the table."""

    gpu: str
    gpus: int
    parallel: ParallelSpec
    # Recomputations to try in this order until one fits; empty: that of `parallel`.
    recompute: tuple[Recompute, ...] = ()
    # Batch size, recipe and precision, if different from the request's.
    batch_size: int | None = None
    recipe: str | None = None
    precision: Precision | None = None

    def specs(self) -> tuple[ParallelSpec, ...]:
        """Ways to spread the model, in the order in which they are tried."""
        if not self.recompute:
            return (self.parallel,)
        return tuple(replace(self.parallel, recompute=each) for each in self.recompute)


def cells_of(
    request: SweepRequest,
    machines: Sequence[str],
    gpus: Sequence[int],
    parallel: Sequence[str],
    recipes: Sequence[str | None] = (None,),
    precisions: Sequence[Precision | None] = (None,),
) -> list[SweepCell]:
    """Return all cells, in a fixed order, without duplicates.

    ``parallel``: texts of ``--parallel``, or ``auto``. A text that does not fit a number of GPUs still makes a cell,
    which reports that. Raises ``InputError`` for a machine or number of GPUs that makes no cluster.
    """
    found: dict[SweepCell, None] = {}
    for count in gpus:
        for machine in machines:
            cluster = load_cluster(machine, count, network=request.network)
            for text in parallel:
                for cell in _cells(request, machine, count, text, cluster.gpus_per_node):
                    for recipe, precision in product(recipes, precisions):
                        # Words that mean another recomputation in the recipe are not tried twice.
                        meant = map(training_recipe(recipe or request.recipe).recompute, cell.recompute)
                        tried = tuple(dict.fromkeys(meant))
                        found[replace(cell, recompute=tried, recipe=recipe, precision=precision)] = None
    return list(found)


def _cells(request: SweepRequest, machine: str, count: int, text: str, per_node: int) -> Iterator[SweepCell]:
    """Yield the cells of one text of ``--parallel`` on one number of GPUs."""
    for size in request.sizes:
        own = None if size == request.samples else size
        sized = replace(request, batch_size=size)
        if text == "auto":
            for spec in ways_to_spread(sized, count, per_node):
                yield SweepCell(machine, count, spec, RECOMPUTE, own)
            continue
        spec = read_parallel(text, count)
        passes = _micro_batches(sized, spec.replicas, spec.pp)
        if request.global_batch is None or "micro-batches" in text:
            yield SweepCell(machine, count, spec)
            return
        if passes is not None:
            yield SweepCell(machine, count, replace(spec, micro_batches=passes), (), own)


def ways_to_spread(request: SweepRequest, gpus: int, gpus_per_node: int) -> Iterator[ParallelSpec]:
    """Yield ways to spread the model over ``gpus`` GPUs whose degrees divide that number.

    Degrees that do not divide the model are detected when it is built.
    """
    longest = max((request.sequence_length or 0) // TOKENS_OF_A_RANK, 1)
    for tp in _powers(min(gpus, gpus_per_node)):
        for cp in _powers(min(gpus // tp, longest)):
            for pp in _powers(gpus // (tp * cp)):
                if gpus % (tp * cp * pp):
                    continue
                replicas = gpus // (tp * cp * pp)
                micro_batches = _micro_batches(request, replicas, pp)
                if micro_batches is None:
                    continue
                divided = math.gcd(request.experts, replicas * cp, gpus_per_node // tp)
                for stages in _stages(ParallelSpec(cp=cp, tp=tp, pp=pp, micro_batches=micro_batches), request.layers):
                    for way in _ways(stages, replicas):
                        yield way
                        if request.experts and divided > 1:
                            yield replace(way, ep=divided)


def _stages(rest: ParallelSpec, layers: int) -> Iterator[ParallelSpec]:
    """Yield splits of the model into pipeline stages with one or several parts each.

    If the layers do not divide evenly, the first and the last part, which also hold embedding and head, have fewer.
    """
    interleaved = bool(layers) and rest.pp > 1 and rest.micro_batches % rest.pp == 0
    for virtual in range(1, MOST_VIRTUAL_STAGES + 1 if interleaved else 2):
        spec = rest if virtual == 1 else replace(rest, schedule="interleaved", virtual_stages=virtual)
        if not layers or layers % spec.stages == 0:
            yield spec
            continue
        if virtual.bit_count() > 1:
            continue
        each = -(-layers // spec.stages)
        missing = each * spec.stages - layers
        ends = each - -(-missing // 2), each - missing // 2
        if spec.pp > 1 and min(ends) >= 0:
            yield replace(spec, first_layers=ends[0], last_layers=ends[1])


def _ways(rest: ParallelSpec, replicas: int) -> Iterator[ParallelSpec]:
    """Yield whole parameters, shared optimizer state, and shared parameters.

    The last not in a pipeline, where each micro-batch would gather them again.
    """
    yield replace(rest, dp=replicas)
    if replicas > 1:
        yield replace(rest, fsdp=replicas, zero=1)
        if rest.pp == 1:
            yield replace(rest, fsdp=replicas, zero=3)
    elif rest.pp == 1 and rest.cp > 1:
        yield replace(rest, zero=3)


def _micro_batches(request: SweepRequest, replicas: int, stages: int) -> int | None:
    """Number of micro-batches, ``None`` if the global batch does not divide."""
    if request.global_batch is None:
        return MICRO_BATCHES_PER_STAGE * stages if stages > 1 else 1
    count, rest = divmod(request.global_batch, request.samples * replicas)
    return None if rest or not count else count


def experts_of(config: Mapping[str, Any]) -> int:
    """Number of experts of a layer in a Hugging Face configuration, 0 if it has none."""
    return next((config[key] for key in EXPERT_KEYS if isinstance(config.get(key), int)), 0)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def parse_counts(text: str, option: str) -> list[int]:
    """Parse numbers of GPUs such as ``8,64,512``; raises ``InputError`` naming an invalid part."""
    found = []
    for part in text.split(","):
        number = whole_number(part)
        if not number:
            raise InputError(f"{option} {text!r}: {part.strip()!r} is no number of GPUs; write such as 8,64,512")
        found.append(number)
    return found


def parse_names(text: str, option: str) -> list[str]:
    """Parse names such as ``h100-sxm,h200-sxm``."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise InputError(f"{option} {text!r}: has an empty name between commas; remove a comma")
    return found


def record_of(request: SweepRequest, cell: SweepCell) -> dict[str, Any]:
    """Return the record that identifies one cell in the key of its result."""
    return {"question": vars(request), "candidate": asdict(cell)}
