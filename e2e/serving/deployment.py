"""One deployed copy of a model: GPUs, how they share it, and in which precision it is stored and computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import get_args

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_records import Machine
from costmodel.operators.experts import ExpertRouting
from costmodel.operators.layers import STORED_BITS
from e2e.serving.engines import Engine
from e2e.serving.served_model import Experts, LatentAttention, LinearMixer, ServedModel, SoftmaxAttention
from e2e.serving.speculation import Speculation
from e2e.step.options import Precision

# Bits of a stored weight, its scales included (block: an FP32 per 128 x 128).
WEIGHT_BITS = {"bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "fp8-block": 8.002, **STORED_BITS}
CACHE_BITS = {"bf16": 16, "fp16": 16, "fp8": 8}
_OTHER_NAMES = {"fp8_block": "fp8-block", "fp4": "nvfp4", "bfloat16": "bf16", "float16": "fp16", "w4a16": "int4"}


@dataclass(frozen=True)
class ServingPrecision:
    """How a deployment stores dense weights, weights of experts and the cache, and what it multiplies with."""

    weights: str = "bf16"
    experts: str = "bf16"
    # ``fp8`` or ``bf16``: operands of the products.
    activations: str = "bf16"
    kv: str = "bf16"


def read_precision(text: str, model: ServedModel, machine: Machine) -> ServingPrecision:
    """Precision of ``weights=fp8,experts=mxfp4,activations=fp8,kv=fp8``; what is left out is as ``model`` is stored.

    A GPU without arithmetic in 8 bits multiplies weights of 8 bits with 16-bit activations.
    """
    if text and "=" not in text:
        of = "is a recipe of training" if text in get_args(Precision) else "says not of what"
        raise InputError(f"--precision {text}: {of}; write such as weights=fp8,experts=mxfp4,activations=fp8,kv=fp8")
    asked = _pairs("--precision", text, tuple(each.name for each in fields(ServingPrecision)))
    for key, value in asked.items():
        value = _OTHER_NAMES.get(value, value)
        known = CACHE_BITS if key == "kv" else {"bf16": 0, "fp8": 0} if key == "activations" else WEIGHT_BITS
        if value not in known:
            raise InputError(f"--precision {key}={value}: choose one of {', '.join(known)}")
        asked[key] = value
    weights = asked.get("weights") or model.stored or "bf16"
    experts = asked.get("experts") or (weights if "weights" in asked else model.stored_experts or weights)
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
    # Groups of ranks that each hold all heads of the attention and have their own sequences.
    attention_dp: int = 1

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


def read_parallel(text: str, gpus: int) -> ServingParallel:
    """Parallelism of ``tp=8,ep=8,dp-attention=8,pp=1``; without ``tp`` it fills ``gpus``."""
    asked = _pairs("--parallel", text, ("tp", "pp", "ep", "dp-attention"))
    numbers: dict[str, int] = {}
    for key, value in asked.items():
        number = whole_number(value)
        if not number:
            raise InputError(f"--parallel {key}={value}: must be a whole number of at least 1")
        numbers[key] = number
    pp = numbers.get("pp", 1)
    found = ServingParallel(
        numbers.get("tp", max(gpus // pp, 1)), pp, numbers.get("ep", 1), numbers.get("dp-attention", 1)
    )
    for key, ranks in (("ep", found.ep), ("dp-attention", found.attention_dp)):
        if found.tp % ranks:
            raise InputError(f"--parallel {key}={ranks}: must divide tp={found.tp}")
    if gpus % found.gpus:
        raise InputError(f"--parallel {text}: needs {found.gpus} GPUs a copy, which do not divide --gpus {gpus}")
    return found


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
    keys, sides = ("tp", "pp", "ep", "dp-attention"), ("prefill", "decode")
    asked = _pairs("--disaggregate", text, (*sides, *(f"{side}-{key}" for side in sides for key in keys)))
    counts, ways = [], []
    for side in sides:
        count = whole_number(asked.get(side, ""))
        if not count:
            raise InputError(f"--disaggregate {text}: write how many copies do what, as prefill=2,decode=6")
        own = {key: asked[f"{side}-{key}"] for key in keys if f"{side}-{key}" in asked}
        counts.append(count)
        if own:
            size = (whole_number(own.setdefault("tp", str(parallel.tp))) or 1) * (whole_number(own.get("pp", "1")) or 1)
            ways.append(read_parallel(",".join(f"{key}={value}" for key, value in own.items()), size))
        else:
            ways.append(parallel)
    return Disaggregation(counts[0], counts[1], ways[0], ways[1])


def _pairs(option: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in known or not equals:
            raise InputError(f"{option} {part}: write NAME=VALUE with {', '.join(known)}")
        if key in found:
            raise InputError(f"{option} {key}: is given twice; leave one out")
        found[key] = value
    return found


@dataclass(frozen=True)
class Deployment:
    """One copy of ``model`` on the GPUs of ``cluster``."""

    model: ServedModel
    cluster: Cluster
    engine: Engine
    parallel: ServingParallel
    precision: ServingPrecision
    # ``None``: every token draws its experts, all equally likely.
    routing: ExpertRouting | None
    speculation: Speculation | None = None

    @property
    def draft(self) -> Deployment | None:
        """The draft model of speculative decoding, on the same GPUs."""
        if self.speculation is None:
            return None
        return replace(self, model=self.speculation.draft, speculation=None)

    def check(self) -> None:
        """Raise ``InputError`` if the ranks cannot share the model."""
        heads = {
            layer.mixer.heads
            for layer, _ in self.model.layers
            if isinstance(layer.mixer, SoftmaxAttention | LatentAttention)
        }
        for each in heads:
            if each % self.parallel.attention_tp:
                raise InputError(
                    f"--parallel tp={self.parallel.tp}: {each} heads of attention do not divide by "
                    f"{self.parallel.attention_tp} ranks"
                )
        for layer, _ in self.model.layers:
            if isinstance(layer.block, Experts) and layer.block.count % self.parallel.ep:
                raise InputError(
                    f"--parallel ep={self.parallel.ep}: {layer.block.count} experts do not divide by so many ranks"
                )
        if self.model.depth < self.parallel.pp:
            raise InputError(f"--parallel pp={self.parallel.pp}: {self.model.name} has {self.model.depth} layers")

    def weight_bytes(self) -> float:
        """Bytes of weights on the fullest rank."""
        parallel, hidden = self.parallel, self.model.hidden
        dense, routed = WEIGHT_BITS[self.precision.weights] / 8, WEIGHT_BITS[self.precision.experts] / 8
        found = 0.0
        for layer, count in self.model.layers:
            block = layer.block
            own = layer.mixer.parameters(hidden) / parallel.attention_tp * dense
            if isinstance(block, Experts):
                own += 3 * hidden * (block.count * block.inner * routed + block.shared * dense) / parallel.tp
                own += hidden * block.count * 2  # the router, on every rank
            else:
                own += block.parameters(hidden) / parallel.tp * dense
            found += count * own
        return found / parallel.pp + self.model.embedding_parameters * 2 / parallel.tp

    def cache_bytes(self) -> float:
        """Bytes of one token in the cache of the fullest rank, windows and states not counted."""
        found = 0
        for layer, count in self.model.layers:
            mixer = layer.mixer
            if isinstance(mixer, LatentAttention):
                found += count * mixer.cache_elements
            elif isinstance(mixer, SoftmaxAttention) and not mixer.window:
                found += count * self._kept(mixer)
        return found * CACHE_BITS[self.precision.kv] / 8 / self.parallel.pp

    @property
    def sequence_tokens(self) -> int:
        """Tokens whose cache is as large as what a sequence holds whatever its length: windows, and the states of
        linear attention.
        """
        found = 0.0
        for layer, count in self.model.layers:
            mixer = layer.mixer
            if isinstance(mixer, LinearMixer):
                # In FP32; the last inputs of the convolution in 16 bits.
                states = mixer.value_heads * mixer.key_dim * mixer.value_dim * 4
                inputs = (mixer.convolution - 1) * mixer.channels * 2
                found += count * (states + inputs) / self.parallel.attention_tp
            elif isinstance(mixer, SoftmaxAttention) and mixer.window:
                found += count * mixer.window * self._kept(mixer) * CACHE_BITS[self.precision.kv] / 8
        return math.ceil(found / self.parallel.pp / self.cache_bytes()) if found and self.cache_bytes() else 0

    def _kept(self, mixer: SoftmaxAttention) -> int:
        """Elements of one token in the cache of a rank."""
        return 2 * max(mixer.kv_heads // self.parallel.attention_tp, 1) * mixer.head_dim
