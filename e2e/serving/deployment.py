"""One deployed copy of a model: GPUs and how they share it, its precision, and a draft model beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from costmodel.base.errors import InputError
from costmodel.base.units import check_number
from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_records import Machine
from costmodel.operators.experts import ExpertRouting
from costmodel.operators.layers import STORED_BITS
from e2e.capture.models.served_model import Experts, ServedModel, named_model
from e2e.serving.engines import Engine
from e2e.step.options import Precision, named_counts, named_values

# Bits of a stored weight, its scales included.
WEIGHT_BITS = {"bf16": 16.0, "fp16": 16.0, **STORED_BITS}
CACHE_BITS = {"bf16": 16, "fp16": 16, "fp8": 8}
_STORED = {"weights": WEIGHT_BITS, "experts": WEIGHT_BITS, "activations": ("bf16", "fp8"), "kv": CACHE_BITS}
_OTHER_NAMES = {"fp8_block": "fp8-block", "fp4": "nvfp4", "bfloat16": "bf16", "float16": "fp16", "w4a16": "int4"}
_MOST_TOKENS = 64  # of a draft


@dataclass(frozen=True)
class ServingPrecision:
    """How a deployment stores dense weights, weights of experts and the cache, and what it multiplies with."""

    weights: str = "bf16"
    experts: str = "bf16"
    activations: str = "bf16"  # operands of the products
    kv: str = "bf16"


def read_precision(text: str, model: ServedModel, machine: Machine) -> ServingPrecision:
    """Precision of ``weights=fp8,experts=mxfp4,activations=fp8,kv=fp8``; what is left out is as ``model`` is stored.

    A GPU without arithmetic in 8 bits multiplies weights of 8 bits with 16-bit activations.
    """
    if text and "=" not in text:
        of = "is a recipe of training" if text in get_args(Precision) else "says not of what"
        raise InputError(f"--precision {text}: {of}; write such as weights=fp8,experts=mxfp4,activations=fp8,kv=fp8")
    asked = {key: _OTHER_NAMES.get(value, value) for key, value in named_values("--precision", text, _STORED).items()}
    for key, value in asked.items():
        if value not in _STORED[key]:
            raise InputError(f"--precision {key}={value}: choose one of {', '.join(_STORED[key])}")
    weights = asked.get("weights") or model.stored or "bf16"
    experts = asked.get("experts") or (weights if "weights" in asked else model.stored_experts or weights)
    experts = experts if model.has_experts else weights  # one list of options for all models
    able = "float8" in machine.compute
    if asked.get("activations") == "fp8" and not able:
        raise InputError(
            f"--precision activations=fp8: {machine.name} has no arithmetic in FP8; write activations=bf16"
        )
    eight = able and any(each.startswith("fp8") for each in (weights, experts))
    activations = asked.get("activations", "fp8" if eight else "bf16")
    return ServingPrecision(weights, experts, activations, asked.get("kv", "bf16"))


@dataclass(frozen=True)
class ServingParallel:
    """Ways to share a model: tensor, pipeline and expert parallelism, and copies of the attention."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    attention_dp: int = 1  # groups of ranks that each hold all heads of the attention and have their own sequences

    @property
    def gpus(self) -> int:
        """GPUs of one copy of the model."""
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """Ranks that share the heads of one sequence."""
        return self.tp // self.attention_dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share the matrices of one expert."""
        return self.tp // self.ep


_PARALLEL = ("tp", "pp", "ep", "dp-attention")


def read_parallel(text: str, gpus: int) -> ServingParallel:
    """Parallelism of ``tp=8,ep=8,dp-attention=8,pp=1``; without ``tp`` it fills ``gpus``."""
    numbers = named_counts("--parallel", text, _PARALLEL)
    found = _parallel({"tp": max(gpus // numbers.get("pp", 1), 1)} | numbers)
    if gpus % found.gpus:
        raise InputError(f"--parallel {text}: needs {found.gpus} GPUs a copy, which do not divide --gpus {gpus}")
    return found


def _parallel(numbers: Mapping[str, int]) -> ServingParallel:
    for key in ("ep", "dp-attention"):
        if numbers["tp"] % numbers.get(key, 1):
            raise InputError(f"--parallel {key}={numbers[key]}: must divide tp={numbers['tp']}")
    return ServingParallel(*(numbers.get(key, 1) for key in _PARALLEL))


@dataclass(frozen=True)
class Disaggregation:
    """Copies of a model that compute prompts and copies that decode, each with its own parallelism."""

    prefill: int
    decode: int
    prefill_parallel: ServingParallel
    decode_parallel: ServingParallel

    @property
    def gpus(self) -> int:
        """GPUs of all copies."""
        return self.prefill * self.prefill_parallel.gpus + self.decode * self.decode_parallel.gpus


def read_disaggregation(text: str, parallel: ServingParallel) -> Disaggregation:
    """Copies of ``prefill=2,decode=6,prefill-tp=4,decode-tp=8``; those without a ``tp`` of their own are as
    ``parallel``.
    """
    sides = ("prefill", "decode")
    asked = named_counts("--disaggregate", text, (*sides, *(f"{side}-{key}" for side in sides for key in _PARALLEL)))
    if not {*sides} <= asked.keys():
        raise InputError(f"--disaggregate {text}: write how many copies do what, as prefill=2,decode=6")
    ways = []
    for side in sides:
        own = {key: asked[f"{side}-{key}"] for key in _PARALLEL if f"{side}-{key}" in asked}
        ways.append(_parallel({"tp": parallel.tp} | own) if own else parallel)
    return Disaggregation(asked["prefill"], asked["decode"], *ways)


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding (Leviathan et al., arXiv 2211.17192): ``tokens`` of ``draft`` are verified in each step, and
    each is accepted with the probability ``acceptance`` if all before it were.
    """

    tokens: int
    acceptance: float
    draft: ServedModel

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a sequence in one step: those accepted, and one of the model itself."""
        return sum(self.acceptance**each for each in range(self.tokens + 1))


def read_speculation(text: str, model: ServedModel) -> Speculation | None:
    """Speculation of ``tokens=3,acceptance=0.7,draft=MODEL``; without ``draft``, layers of ``model`` predict the tokens
    (multi-token prediction).
    """
    if not text:
        return None
    values = named_values("--speculate", text, ("tokens", "acceptance", "draft"))
    try:
        tokens, acceptance = int(values["tokens"]), float(values["acceptance"])
    except (KeyError, ValueError):
        raise InputError(
            f"--speculate {text}: write tokens=3,acceptance=0.7, and draft=MODEL for a draft model"
        ) from None
    check_number("speculate tokens", tokens, 1, _MOST_TOKENS)
    check_number("speculate acceptance", acceptance, 0, 1)
    if "draft" in values:
        return Speculation(tokens, acceptance, named_model(values["draft"]))
    if not model.predicting:
        raise InputError(f"--speculate: {model.name} has no layers that predict further tokens; name a draft=MODEL")
    layer = model.layers[-1][0]
    return Speculation(tokens, acceptance, replace(model, layers=((layer, 1),), tied=True, predicting=0))


@dataclass(frozen=True)
class Deployment:
    """One copy of ``model`` on the GPUs of ``cluster``."""

    model: ServedModel
    cluster: Cluster
    engine: Engine
    parallel: ServingParallel
    precision: ServingPrecision
    routing: ExpertRouting
    speculation: Speculation | None = None

    @property
    def draft(self) -> Deployment | None:
        """The draft model of speculative decoding, on the same GPUs."""
        if self.speculation is None:
            return None
        return replace(self, model=self.speculation.draft, speculation=None)

    def check(self) -> None:
        """Raise ``InputError`` if the ranks cannot share the model."""
        parallel = self.parallel
        if parallel.ep > 1 and not self.model.has_experts:
            raise InputError(f"--parallel ep={parallel.ep}: {self.model.name} has no experts; leave it out")
        for layer, _ in self.model.layers:
            heads, experts = getattr(layer.mixer, "heads", 0), getattr(layer.block, "count", 0)
            if heads % parallel.attention_tp:
                raise InputError(
                    f"--parallel tp={parallel.tp}: {heads} heads of attention do not divide by "
                    f"{parallel.attention_tp} ranks"
                )
            if experts % parallel.ep:
                raise InputError(f"--parallel ep={parallel.ep}: {experts} experts do not divide by so many ranks")
        if self.model.depth < parallel.pp:
            raise InputError(f"--parallel pp={parallel.pp}: {self.model.name} has {self.model.depth} layers")

    def weight_bytes(self) -> float:
        """Bytes of weights on the fullest rank."""
        parallel, hidden = self.parallel, self.model.hidden
        dense, routed = WEIGHT_BITS[self.precision.weights] / 8, WEIGHT_BITS[self.precision.experts] / 8
        found = 0.0
        for layer, count in self.model.layers:
            block = layer.block
            own = layer.mixer.parameters(hidden) / parallel.attention_tp * dense
            if isinstance(block, Experts):
                matrices = (3 if block.gated else 2) / parallel.tp
                own += matrices * hidden * (block.count * block.inner * routed + block.shared * dense)
                own += hidden * block.count * 2  # the router, on every rank
            else:
                own += block.parameters(hidden) / parallel.tp * dense
            found += count * own
        return found / parallel.pp + self.model.embedding_parameters * 2 / parallel.tp

    def cache_bytes(self) -> float:
        """Bytes of one token in the cache of the fullest rank, windows and states not counted."""
        ranks = self.parallel.attention_tp
        elements = sum(count * layer.mixer.cache_elements(ranks) for layer, count in self.model.layers)
        return elements * CACHE_BITS[self.precision.kv] / 8 / self.parallel.pp

    @property
    def sequence_tokens(self) -> int:
        """Tokens whose cache is as large as what a sequence holds whatever its length: windows, and the states of
        linear attention.
        """
        ranks, bits, each = self.parallel.attention_tp, CACHE_BITS[self.precision.kv], self.cache_bytes()
        found = sum(count * layer.mixer.held_bytes(ranks, bits) for layer, count in self.model.layers)
        return math.ceil(found / self.parallel.pp / each) if each else 0
