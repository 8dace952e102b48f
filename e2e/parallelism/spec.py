"""Parallel layout of a model: the text ``dp=2,tp=4,pp=2,micro-batches=8`` and its keys.

================== ====================================================================================================
``dp``             replicas that average their gradients (DistributedDataParallel)
``fsdp``           ranks that shard parameters, gradients and optimizer state (``zero=3``), or less with ``zero=1|2``
``cp``             ranks that share every sequence (context parallel): each computes a part of its tokens and gathers
                   keys and values for the attention (Llama 3, arXiv 2407.21783, section 3.3.2); they also shard
                   parameters with ``fsdp``, or without it with ``zero``
``cp-form``        ``gather`` (default), ``ring``: block by block, merged in FP32, as in PyTorch's context_parallel, or
                   ``a2a``: tokens are exchanged for heads around the attention (DeepSpeed-Ulysses, arXiv 2309.14509)
``tp``             ranks that share every layer: column and row splits, vocabulary split (Megatron-LM)
``ep``             ranks, of those with other tokens, among which the experts of a layer are divided (expert parallel):
                   tokens are sent to the ranks of their experts and back; ``--routing`` gives their distribution
``etp``            ranks of ``tp`` that share an expert: all (default), or 1: experts are whole, and with ``sp`` each
                   rank sends its own part of the sequence (``expert_tensor_parallel_size`` of Megatron-LM)
``ep-dispatch``    ``alltoall`` (default): a row for every token and expert is exchanged; ``deepep``: a token once per
                   rank, over the network once per node
``ep-overlap``     ``yes``: the exchange of tokens with experts overlaps the computation of another micro-batch
``sp``             ``yes``: sequence parallel, activations between tensor-parallel parts are split along the sequence
``pp``             pipeline stages, with the same number of layers except at the ends
``first-layers``   layers of the first part of the model, if different from the others; ``last-layers``: of the last
``micro-batches``  micro-batches of one step; without a pipeline the gradients accumulate
``schedule``       ``1f1b`` (default), ``gpipe`` or ``interleaved``
``virtual-stages`` parts of the model on each stage of the interleaved schedule (default 2 there)
``recompute``      ``none`` (default), ``selective`` (attention scores), ``operators`` (all but attention and every
                   second product, as torchtitan's selective op, which ``selective`` means with ``--recipe
                   torchtitan``) or ``full`` (whole layers)
``recompute-modules`` for ``recompute=selective``: parts of a layer, joined by +: ``core_attn`` (default),
                   ``mla_up_proj``, ``layernorm``, ``mlp``, ``moe_act``, as Megatron-Core names them
``recompute-every`` for ``recompute=full``: recompute one in this number of layers; the others keep their activations
``zero``           sharding among ``fsdp`` and ``cp`` ranks: 1 optimizer state, as Megatron-LM's distributed optimizer
                   (whole gradients, scattered once a step), 2 gradients too (scattered in every pass), 3 (default with
                   ``fsdp``) parameters too
``overlap-gather`` ``yes``: parameters of ``zero=1|2`` are gathered layer by layer during the next forward pass
``prefetch``       layers that ``zero=3`` gathers ahead of the running one (default 1)
``reduce-dtype``   ``float32``: 16-bit gradients are summed over the ranks in FP32; ``same`` (default): in 16 bits
``bucket-mb``      size of a gradient bucket in MiB (default 25, as DistributedDataParallel)
``master-weights`` ``yes``: 16-bit parameters with FP32 master weights; with FP16 the loss is scaled. With ``zero=3``
                   the shards are FP32, and gathered in 16 bits (mixed precision of FSDP)
``clip``           ``yes``: gradients are clipped by their norm over all ranks; ``no``. Default: that of the stack
``overlap``        ``no``: gradients are reduced after the backward pass instead of during it
``tp-overlap``     ``yes``: gathers and scatters of ``sp`` overlap their products, piece by piece
``offload-optimizer`` fraction of the optimizer state that is on the host, and updated there; 1 with ``zero=3``: shards
                   and gradients too, which are copied before every gather and after every scatter (CPUOffloadPolicy)
================== ====================================================================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number

Schedule = Literal["1f1b", "interleaved", "gpipe"]
Recompute = Literal["none", "selective", "operators", "full"]
ReduceDtype = Literal["same", "float32"]
ContextForm = Literal["gather", "ring", "a2a"]

BUCKET_MB = 25
RECOMPUTED_MODULES = ("core_attn", "mla_up_proj", "layernorm", "mlp", "moe_act")


@dataclass(frozen=True)
class ParallelSpec:
    """Parallel layout of a job; world size is ``dp * fsdp * cp * tp * pp``.

    Fields: see the module docstring; ``inference``, set by ``--mode``: forward passes alone. ``None``: not set by the
    user, and set by a recipe (:mod:`e2e.sources.recipes`); without one the same as no.
    """

    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    pp: int = 1
    micro_batches: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    schedule: Schedule = "1f1b"
    virtual_stages: int = 1
    recompute: Recompute = "none"
    recompute_every: int = 1
    recompute_modules: str = "core_attn"
    zero: int | None = None
    sequence_parallel: bool | None = None
    bucket_mb: float = BUCKET_MB
    overlap: bool = True
    master_weights: bool | None = None
    reduce_dtype: ReduceDtype | None = None
    overlap_gather: bool | None = None
    prefetch: int = 1
    tp_overlap: bool | None = None
    dispatch: Literal["alltoall", "deepep"] = "alltoall"
    overlap_experts: bool = False
    context_form: ContextForm = "gather"
    expert_tp: int | None = None
    offloaded_state: float = 0.0
    clip: bool | None = None
    inference: bool = False

    @property
    def world_size(self) -> int:
        """Number of GPUs of the job."""
        return self.dp * self.fsdp * self.cp * self.tp * self.pp

    @property
    def replicas(self) -> int:
        """Number of sets of ranks with different sequences."""
        return self.dp * self.fsdp

    @property
    def contributors(self) -> int:
        """Number of ranks with the same part of the model and different tokens, whose gradients are summed."""
        return self.replicas * self.cp

    @property
    def sharing(self) -> int:
        """ZeRO stage of sharing among contributors; 0: none."""
        if self.fsdp > 1:
            return 3 if self.zero is None else self.zero
        return self.zero or 0 if self.cp > 1 else 0

    @property
    def shards(self) -> int:
        """Number of contributors that share parameters or state."""
        return self.fsdp * self.cp if self.sharing else 1

    @property
    def copies(self) -> int:
        """Number of identical sets of sharing contributors."""
        return self.contributors // self.shards

    @property
    def expert_tensor(self) -> int:
        """Number of ``tp`` ranks that split an expert; each sends the tokens of all of them."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def expert_set(self) -> int:
        """Number of neighbouring ranks that hold all experts once."""
        return self.ep * self.expert_tensor

    @property
    def experts_apart(self) -> bool:
        """True if experts are replicated over other ranks than the other parameters."""
        return self.expert_set != self.tp

    @property
    def expert_shards(self) -> int:
        """Number of ranks that shard the same experts."""
        return self.shards * self.tp // self.expert_set if self.sharing else 1

    @property
    def sharded_masters(self) -> bool:
        """True if shards of parameters are FP32, and 16-bit copies of them are gathered."""
        return bool(self.master_weights) and self.sharing == 3

    @property
    def stages(self) -> int:
        """Number of parts of the layers."""
        return self.pp * self.virtual_stages


MOST_PASSES = 1 << 16  # micro-batches times stages; each pass is simulated


def parse_parallel(text: str, gpus: int | None = None) -> ParallelSpec:
    """Parse the text of ``--parallel``; raise ``InputError`` naming the wrong part.

    ``gpus``: required product of the degrees, if given; without ``dp`` and ``fsdp``, ``dp`` is set to match.
    """
    spec = read_parallel(text, gpus)
    _refuse(text, _problem_of_size(spec, gpus))
    return spec


def read_parallel(text: str, gpus: int | None = None) -> ParallelSpec:
    """Parse as :func:`parse_parallel`, without checking that the degrees give ``gpus``."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or not value:
            raise InputError(f"--parallel {text!r}: {part.strip()!r} is no name=value, such as tp=4")
        field, read = _reader(text, name)
        if field in values:
            raise InputError(f"--parallel {text!r}: {name} is given twice; leave one out")
        try:
            values[field] = read(value)
        except ValueError as error:
            raise InputError(f"--parallel {text!r}: {name}={value}: {error}") from None
    spec = ParallelSpec(**_with_defaults(values, gpus))
    # A wrong size is reported first, since other problems may follow from it.
    if gpus is None or spec.world_size == gpus:
        _refuse(text, _problem(spec, "schedule" in values))
    return spec


# Keys for training only.
_OF_TRAINING: tuple[str, ...] = (
    "fsdp", "zero", "schedule", "virtual-stages", "recompute", "recompute-modules", "recompute-every", "bucket-mb",
    "overlap", "master-weights", "reduce-dtype", "overlap-gather", "prefetch", "offload-optimizer", "clip",
)  # fmt: skip


def for_inference(spec: ParallelSpec) -> ParallelSpec:
    """Return ``spec`` for forward passes alone; raise ``InputError`` for options of gradients and optimizer state."""
    for name in _OF_TRAINING:
        field, _ = READERS[name]
        if getattr(spec, field) != _DEFAULTS[field]:
            raise InputError(
                f"--parallel {text_of(spec)!r}: {name} is about gradients and optimizer state, which --mode inference "
                "does not have; use dp, tp, sp, pp, cp, ep and etp"
            )
    return replace(spec, inference=True)


def require_consistent(spec: ParallelSpec, gpus: int | None = None) -> None:
    """Raise ``InputError`` for a spec that contradicts itself or is not for ``gpus``; parsed specs are checked
    already.
    """
    _refuse(text_of(spec), _problem_of_size(spec, gpus) or _problem(spec, settled=True))


def text_of(spec: ParallelSpec) -> str:
    """Return the ``--parallel`` text of ``spec``: all values other than the defaults, or at least ``dp``."""
    return ",".join(f"{name}={value}" for name, value in keys_of(spec).items()) or "dp=1"


def keys_of(spec: ParallelSpec) -> dict[str, str]:
    """Return key of ``--parallel`` -> text, for all values other than the defaults."""
    values = {name: getattr(spec, field) for name, (field, _) in READERS.items()}
    return {name: _written(value) for name, value in values.items() if value != _DEFAULTS[READERS[name][0]]}


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value).removesuffix(".0")


def _reader(text: str, name: str) -> tuple[str, Callable[[str], Any]]:
    if name in READERS:
        return READERS[name]
    near = difflib.get_close_matches(name, READERS, 1)
    offered = f"did you mean {near[0]}?" if near else f"known: {', '.join(READERS)}"
    raise InputError(f"--parallel {text!r}: {name!r} is not known; {offered}")


def _with_defaults(values: dict[str, Any], gpus: int | None) -> dict[str, Any]:
    if values.get("schedule") == "interleaved":
        values = {"virtual_stages": 2, **values}
    if gpus is not None and "dp" not in values and "fsdp" not in values:
        rest = values.get("cp", 1) * values.get("tp", 1) * values.get("pp", 1)
        if gpus % rest == 0:
            values = {**values, "dp": gpus // rest}
    return values


def _refuse(text: str, problem: str) -> None:
    if problem:
        raise InputError(f"--parallel {text!r}: {problem}")


def _problem_of_size(spec: ParallelSpec, gpus: int | None) -> str:
    if gpus is None or spec.world_size == gpus:
        return ""
    return f"dp x fsdp x cp x tp x pp = {spec.world_size}, but --gpus is {gpus}"


def _problem(spec: ParallelSpec, scheduled: bool = False, settled: bool = False) -> str:
    """Return the first contradiction, or an empty text.

    ``scheduled``: a schedule is given, even the default; ``settled``: no recipe will set open fields.
    """
    split = spec.sequence_parallel or (spec.sequence_parallel is None and not settled)
    open_sharing = spec.zero is None and not settled and max(spec.fsdp, spec.cp) > 1
    divided = (spec.shards if spec.sharing else spec.contributors) * spec.tp // spec.expert_tensor
    rules = (
        (
            spec.schedule == "interleaved" and (spec.pp < 2 or spec.virtual_stages < 2),
            "schedule=interleaved needs pp and virtual-stages of 2 or more",
        ),
        (
            spec.schedule != "interleaved" and spec.virtual_stages > 1,
            "virtual-stages needs schedule=interleaved",
        ),
        (
            spec.schedule == "interleaved" and spec.micro_batches % spec.pp,
            f"schedule=interleaved needs micro-batches to be a multiple of pp={spec.pp}",
        ),
        (
            spec.pp == 1 and not (spec.first_layers is None and spec.last_layers is None),
            "first-layers and last-layers need a pipeline: pp=2 or more",
        ),
        ((scheduled or spec.schedule != "1f1b") and spec.pp == 1, "schedule needs a pipeline: pp=2 or more"),
        (
            spec.zero is not None and spec.fsdp == spec.cp == 1,
            "zero needs ranks to share with: fsdp=2 (or cp=2) or more",
        ),
        (
            spec.expert_tp not in (None, 1, spec.tp),
            f"etp={spec.expert_tp}: experts are whole (etp=1) or split as the layers are (etp={spec.tp})",
        ),
        (
            spec.expert_tensor < spec.tp and not split,
            "etp=1 needs sp=yes: every rank of tp sends its own part of the sequence to whole experts",
        ),
        (divided % spec.ep, f"ep={spec.ep} does not divide {_named_divided(spec)} = {divided}"),
        (
            spec.ep == 1 and (spec.dispatch != "alltoall" or spec.overlap_experts),
            "ep-dispatch and ep-overlap need experts that are divided: ep=2 or more",
        ),
        (spec.cp == 1 and spec.context_form != "gather", "cp-form is for ranks that share sequences: cp=2 or more"),
        (spec.overlap_experts and spec.micro_batches == 1, "ep-overlap=yes needs micro-batches=2 or more"),
        (
            spec.micro_batches * spec.pp > MOST_PASSES,
            f"micro-batches x pp are more than the {MOST_PASSES:,} passes that a step is taken with; give fewer",
        ),
        (bool(spec.sequence_parallel) and spec.tp == 1, "sp=yes needs tp=2 or more"),
        (bool(spec.tp_overlap) and not split, "tp-overlap=yes is for what sp=yes gathers and scatters"),
        (
            bool(spec.overlap_gather) and spec.sharing not in (1, 2) and not open_sharing,
            "overlap-gather=yes is for zero=1 or 2",
        ),
        (spec.prefetch != 1 and spec.sharing != 3, "prefetch is for zero=3, which gathers layer by layer"),
        (
            0 < spec.offloaded_state < 1 and spec.sharing == 3,
            "offload-optimizer=1 is for zero=3, which puts shards, gradients and state on the host or none of them",
        ),
        (spec.recompute_every > 1 and spec.recompute != "full", "recompute-every needs recompute=full"),
        (
            spec.recompute_modules != "core_attn" and spec.recompute != "selective",
            "recompute-modules needs recompute=selective",
        ),
        (
            not spec.overlap and spec.sharing == 3,
            "overlap=no is for dp, or for fsdp with zero=1 or 2; gradients of zero=3 are shared layer by layer",
        ),
    )
    return next((sentence for broken, sentence in rules if broken), "")


def _named_divided(spec: ParallelSpec) -> str:
    """Return the keys whose ranks divide the experts."""
    names = ("fsdp x cp" if spec.sharing else "dp x cp", *(("tp",) if spec.expert_tensor < spec.tp else ()))
    return " x ".join(names)


def _count(value: str) -> int:
    number = whole_number(value)
    if not number:
        raise ValueError("must be a whole number, 1 or more")
    return number


def _natural(value: str) -> int:
    number = whole_number(value)
    if number is None:
        raise ValueError("must be a whole number, 0 or more")
    return number


def _size(value: str) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError("must be more than 0")
    return number


def _share(value: str) -> float:
    number = float(value)
    if not 0 < number <= 1:
        raise ValueError("must be more than 0 and at most 1")
    return number


def _one_of(*allowed: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in allowed:
            raise ValueError(f"choose one of {', '.join(allowed)}")
        return value

    return read


def _modules(value: str) -> str:
    for name in value.split("+"):
        _one_of(*RECOMPUTED_MODULES)(name)
    return value


def _flag(value: str) -> bool:
    return _one_of("yes", "no")(value) == "yes"


def _level(value: str) -> int:
    return int(_one_of("1", "2", "3")(value))


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "dp": ("dp", _count),
    "fsdp": ("fsdp", _count),
    "cp": ("cp", _count),
    "cp-form": ("context_form", _one_of(*get_args(ContextForm))),
    "ep": ("ep", _count),
    "etp": ("expert_tp", _count),
    "ep-dispatch": ("dispatch", _one_of("alltoall", "deepep")),
    "ep-overlap": ("overlap_experts", _flag),
    "tp": ("tp", _count),
    "sp": ("sequence_parallel", _flag),
    "pp": ("pp", _count),
    "first-layers": ("first_layers", _natural),
    "last-layers": ("last_layers", _natural),
    "micro-batches": ("micro_batches", _count),
    "schedule": ("schedule", _one_of(*get_args(Schedule))),
    "virtual-stages": ("virtual_stages", _count),
    "recompute": ("recompute", _one_of("none", "selective", "operators", "full")),
    "recompute-modules": ("recompute_modules", _modules),
    "recompute-every": ("recompute_every", _count),
    "zero": ("zero", _level),
    "bucket-mb": ("bucket_mb", _size),
    "overlap": ("overlap", _flag),
    "master-weights": ("master_weights", _flag),
    "reduce-dtype": ("reduce_dtype", _one_of("same", "float32")),
    "overlap-gather": ("overlap_gather", _flag),
    "prefetch": ("prefetch", _natural),
    "tp-overlap": ("tp_overlap", _flag),
    "offload-optimizer": ("offloaded_state", _share),
    "clip": ("clip", _flag),
}
_DEFAULTS = {each.name: each.default for each in fields(ParallelSpec)}
