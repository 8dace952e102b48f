"""Device work of one step of a serving engine on one rank: the operators of its layers, engine's kernels as they are.

Work that depends on the number of rows alone (products, norms, experts, all-reduces) is apart from attention, which
depends on the lengths of the sequences. Operators are those of :mod:`costmodel.operators`; ``count`` says how often a
step runs each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention, AttentionKernel, CausalConvolution, LinearAttention
from costmodel.operators.collective_transfer import CollectiveKind, CollectiveTransfer
from costmodel.operators.device_work import Elementwise, Gemm, Reduction, ScaledCast, ScaledGemm, StoredGemm
from costmodel.operators.experts import ExpertLayer
from costmodel.operators.layers import STORED_BITS
from e2e.capture.models.served_model import Experts, FeedForward, LatentAttention, LinearMixer, SoftmaxAttention
from e2e.serving.deployment import Deployment

# Launches of a layer of experts. SGLang's take the host four times as long as seven kernels: prompts of one user take
# 0.9 to 1.9 ms a layer longer than their kernels, whatever their length.
_EXPERT_LAUNCHES = {"sglang": 30}
# Kernels of sampling beside the largest value (temperature, penalties, random numbers), and of the inputs of a step.
_SAMPLING, _INPUTS = 4, 3
# What the tables of engines' attention hold beside it: the rotary embedding, and the write to the cache
# (``collector/*/collect_attn.py`` of ai-dynamo/aiconfigurator).
_ROTARY_INSIDE, _CACHE_WRITE_INSIDE = ("trtllm",), ("trtllm", "sglang")
_HALF = "bfloat16"
# Up to this many rows a product takes the time of its weights' bytes, whatever their scales. The tables of products
# with scales of blocks were timed launch by launch: of few rows they hold the host's time. Whole attention layers of
# DeepSeek-V3 in TensorRT-LLM (mla_generation_module_perf) say so.
_FEW_ROWS = 256
# Further small kernels around latent attention of single tokens (queries and cache are split, joined and copied): whole
# layers of vLLM take 30 us more than those of TensorRT-LLM on H100 and H200 (mla_generation_module_perf of both).
_LATENT_BESIDES = {"vllm": 12}


@dataclass(frozen=True)
class Work:
    """An operator that a step runs ``count`` times; ``part``: layer part for breakdowns."""

    operator: AnyOperator
    count: float
    part: str


class StepWork:
    """Work of the steps of one deployment."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.model, self.parallel = deployment.model, deployment.parallel
        self.precision, self.engine = deployment.precision, deployment.engine
        self.architecture = deployment.cluster.machine.chip().architecture
        self.rates = deployment.cluster.machine.compute
        self.mixture = self.model.has_experts

    def own_rows(self, own: int) -> Iterator[Work]:
        """Work of the attention layers for the ``own`` rows of a rank, without attention itself."""
        for layer, count in self.model.layers:
            for each in self._mixer(layer.mixer, own):
                yield Work(each.operator, each.count * count, each.part)

    def rows(self, tokens: int, outputs: int) -> Iterator[Work]:
        """Work for ``tokens`` rows of all layers, of which ``outputs`` are sampled."""
        hidden, tp = self.model.hidden, self.parallel.tp
        own = -(-tokens // self.parallel.attention_dp)
        yield from self.own_rows(own)
        for layer, count in self.model.layers:
            block = layer.block
            if not block.inner:
                continue
            found = self._dense(block, tokens) if isinstance(block, FeedForward) else self._experts(block, tokens)
            for each in found:
                yield Work(each.operator, each.count * count, each.part)
        yield Work(Elementwise("fused", own * hidden, 1, 1, dtype=_HALF), _INPUTS, "head")
        head = Gemm(1, max(outputs, 1), max(self.model.vocabulary // tp, 1), hidden, _HALF, transpose_b=True)
        yield Work(head, 1, "head")
        yield Work(Reduction("max", outputs * self.model.vocabulary, outputs, _HALF), 1, "head")
        yield Work(Elementwise("fused", outputs, 1, 1), _SAMPLING, "head")
        if tp > 1:
            size = outputs * self.model.vocabulary * 2 / tp
            yield Work(self._transfer("all_gather", size, tp), 1, "head")

    def _norm(self, rows: int) -> Iterator[Work]:
        of = self.engine.fuses_norms
        fused = of == "all" or (of == "mixtures" and self.mixture)
        fused |= of != "none" and self.architecture == "blackwell"
        if not (fused and self.parallel.attention_tp > 1):
            yield Work(Elementwise("fused", rows * self.model.hidden, 2, 2, dtype=_HALF), 1, "norm")

    def _cast(self, rows: int, columns: int, stored: str, fused: bool) -> Iterator[Work]:
        """Quantisation of the operand of a product, unless the kernel before does it."""
        if self._eight_bits(stored) and not (fused and self.engine.fuses_casts):
            scaling = "block" if stored == "fp8-block" else "row"
            yield Work(ScaledCast(rows, columns, _HALF, scaling, 1, True), 1, "cast")

    def _eight_bits(self, stored: str) -> bool:
        return stored.startswith("fp8") and self.precision.activations == "fp8"

    def _linear(self, rows: int, columns: int, depth: int, part: str) -> Work:
        return Work(self._product(rows, columns, depth), 1, part)

    def _product(self, rows: int, columns: int, depth: int) -> AnyOperator:
        rows, columns, depth = max(rows, 1), max(columns, 1), max(depth, 1)
        stored = self.precision.weights
        if self._eight_bits(stored):
            blocks = stored == "fp8-block" and rows > _FEW_ROWS
            return ScaledGemm(rows, columns, depth, scaling="block" if blocks else "tensor")
        if stored in STORED_BITS:
            return StoredGemm(rows, columns, depth, stored, self._multiplied(stored))
        return Gemm(1, rows, columns, depth, _HALF, transpose_b=True)

    def _multiplied(self, stored: str) -> str:
        """Type in which weights of ``stored`` are multiplied: FP4 where the GPU has it, else 16 bits."""
        return "float4" if stored.endswith("fp4") and "float4" in self.rates else _HALF

    def _expert_dtype(self) -> tuple[str, str]:
        """Type and scaling of the products of experts; the Triton kernel of vLLM and SGLang is timed with blocks."""
        stored = self.precision.experts
        if self._eight_bits(stored):
            return "float8", "tensor" if stored == "fp8" and self.engine.experts == "trtllm" else "block"
        return self._multiplied(stored), ""

    def _reduced(self, rows: int, ranks: int, row_bytes: int = 0) -> Iterator[Work]:
        if ranks > 1:
            size = rows * (row_bytes or self.model.hidden * 2)
            yield Work(self._transfer("all_reduce", size, ranks, self.engine.all_reduce), 1, "all-reduce")

    def _transfer(self, kind: CollectiveKind, size: float, ranks: int, engine: str = "") -> CollectiveTransfer:
        """Transfer among neighbouring ``ranks``, which may be more than a node holds."""
        nodes = -(-ranks // self.deployment.cluster.gpus_per_node)
        return CollectiveTransfer(kind, size, ranks, nodes, engine=engine)

    def _mixer(self, mixer: SoftmaxAttention | LatentAttention | LinearMixer, rows: int) -> Iterator[Work]:
        hidden, tp, stored = self.model.hidden, self.parallel.attention_tp, self.precision.weights
        yield from self._norm(rows)
        yield from self._cast(rows, hidden, stored, fused=True)
        if isinstance(mixer, SoftmaxAttention):
            heads, groups = mixer.heads // tp, max(mixer.kv_heads // tp, 1)
            wide = (heads * (2 if mixer.gated else 1) + 2 * groups) * mixer.head_dim
            yield self._linear(rows, wide, hidden, "attention products")
            turned = Elementwise("fused", rows * (heads + groups) * mixer.head_dim, 1, 1, dtype=_HALF)
            if mixer.normalised:
                yield Work(turned, 1, "norm")
            if mixer.normalised_together and tp > 1:  # one more pass: sums of squares, of queries and of keys, in FP32
                yield Work(turned, 1, "norm")
                yield from self._reduced(rows, tp, row_bytes=8)
            if self.engine.attention not in _ROTARY_INSIDE:
                yield Work(turned, 1, "rotary")
            if self.engine.attention not in _CACHE_WRITE_INSIDE:
                written = rows * 2 * groups * mixer.head_dim
                yield Work(Elementwise("fused", written, 1, 1, dtype=_HALF), 1, "cache write")
            result = heads * mixer.head_dim
        elif isinstance(mixer, LatentAttention):
            heads = mixer.heads // tp
            query = heads * (mixer.nope_dim + mixer.rope_dim)
            narrow = mixer.kv_rank + mixer.rope_dim
            yield self._linear(rows, mixer.query_rank + narrow if mixer.query_rank else query + narrow, hidden,
                               "attention products")  # fmt: skip
            yield Work(Elementwise("fused", rows * (mixer.query_rank + narrow), 1, 1, dtype=_HALF), 2, "norm")
            if mixer.query_rank:
                yield from self._cast(rows, mixer.query_rank, stored, fused=True)
                yield self._linear(rows, query, mixer.query_rank, "attention products")
            if mixer.index_heads:
                yield self._linear(rows, mixer.index_heads * mixer.index_dim, mixer.query_rank or hidden, "indexer")
                yield self._linear(rows, mixer.index_dim, hidden, "indexer")
            yield Work(Elementwise("fused", rows * (query + narrow), 1, 1, dtype=_HALF), 2, "rotary")
            result = heads * mixer.value_dim
        else:
            keys, values = mixer.key_heads // tp * mixer.key_dim, mixer.value_heads // tp * mixer.value_dim
            yield self._linear(rows, 2 * keys + 2 * values, hidden, "attention products")
            yield self._linear(rows, 2 * mixer.value_heads // tp, hidden, "attention products")
            yield Work(Elementwise("fused", rows * values, 2, 1, dtype=_HALF), 1, "norm")
            result = values
        yield from self._cast(rows, result, stored, fused=False)
        yield self._linear(rows, hidden, result, "attention products")
        yield from self._reduced(rows, tp)

    def _dense(self, block: FeedForward, rows: int) -> Iterator[Work]:
        yield from self._norm(rows)
        yield from self._feed_forward(block.inner, block.gated, rows)
        yield from self._reduced(rows, self.parallel.tp)

    def _feed_forward(self, inner: int, gated: bool, rows: int) -> Iterator[Work]:
        hidden, stored = self.model.hidden, self.precision.weights
        own = max(inner // self.parallel.tp, 1)
        yield from self._cast(rows, hidden, stored, fused=True)
        yield self._linear(rows, own * (2 if gated else 1), hidden, "feed-forward")
        yield Work(Elementwise("fused", rows * own, 2 if gated else 1, 1, dtype=_HALF), 1, "activation")
        yield from self._cast(rows, own, stored, fused=True)
        yield self._linear(rows, hidden, own, "feed-forward")

    def _experts(self, block: Experts, rows: int) -> Iterator[Work]:
        hidden, parallel = self.model.hidden, self.parallel
        yield from self._norm(-(-rows // parallel.attention_dp))
        yield Work(Gemm(1, rows, block.count, hidden, _HALF, transpose_b=True), 1, "router")
        own = max(block.inner // parallel.expert_tp, 1)
        if parallel.ep > 1:
            counts = self.deployment.routing.slowest(rows * block.per_token, block.count, parallel.ep)
        else:
            counts = self.deployment.routing.counts(rows * block.per_token, block.count)
        dtype, scaling = self._expert_dtype()
        stored = self.precision.experts if dtype != "float8" and self.precision.experts in STORED_BITS else ""
        # SGLang runs the Triton kernels of OpenAI over MXFP4, as vLLM does; its table is of one that widens them first.
        kernel = "vllm" if stored == "mxfp4" and self.engine.experts == "sglang" else self.engine.experts
        if not (kernel == "trtllm" or stored == "mxfp4"):  # whose tables begin with the router's scores
            yield Work(Elementwise("fused", rows * block.count, 1, 1), 1, "router")
        # Shared experts as wide as the others, which all rows use beside theirs.
        joined = block.shared // block.inner if self.engine.fuses_shared and parallel.ep == 1 else 0
        counts += (rows,) * joined
        layer = ExpertLayer(counts, rows, hidden, own, dtype, kernel, block.gated, scaling, stored)
        yield Work(layer, 1, "experts")
        if block.shared and not joined:
            yield from self._feed_forward(block.shared, block.gated, rows)
        if parallel.attention_dp > 1:
            size = rows * hidden * 2 / parallel.tp
            yield Work(self._transfer("all_gather", size, parallel.tp), 1, "all-to-all")
            yield Work(self._transfer("reduce_scatter", size * parallel.tp, parallel.tp), 1, "all-to-all")
        else:
            yield from self._reduced(rows, parallel.tp)

    def kernels(self, tokens: int) -> float:
        """Number of kernels of a step of ``tokens`` rows, as many as they take time to launch."""
        experts = _EXPERT_LAUNCHES.get(self.engine.experts, 7)
        attention = sum(
            count * (3 if isinstance(layer.mixer, LatentAttention) else 1) for layer, count in self.model.layers
        )
        return attention + sum(
            each.count * (experts if isinstance(each.operator, ExpertLayer) else 1) for each in self.rows(tokens, 1)
        )

    def decoding(self, batch: int, context: int, queries: int = 1) -> Iterator[Work]:
        """Attention of ``batch`` sequences of ``context`` tokens each, of which the last ``queries`` are new: 1, or 1
        and the draft's tokens with speculative decoding.
        """
        own, tp = -(-batch // self.parallel.attention_dp), self.parallel.attention_tp
        for layer, count in self.model.layers:
            mixer = layer.mixer
            if isinstance(mixer, SoftmaxAttention):
                yield Work(self._softmax(mixer, own, queries, context), count, "attention")
            elif isinstance(mixer, LatentAttention):
                heads = mixer.heads // tp
                seen = min(context, mixer.selected) if mixer.selected else context
                yield Work(Gemm(heads, own * queries, mixer.kv_rank, mixer.nope_dim, _HALF), count, "attention")
                width = mixer.kv_rank + mixer.rope_dim
                latent = Attention(own, heads, queries, max(seen, queries + 1), width, 1, True, _HALF, kernel="mla",
                                   value_dim=mixer.kv_rank, paged=True, cached=self._cached())  # fmt: skip
                yield Work(latent, count, "attention")
                yield Work(Gemm(heads, own * queries, mixer.value_dim, mixer.kv_rank, _HALF), count, "attention")
                if self.engine.attention in _LATENT_BESIDES:
                    small = Elementwise("fused", own * queries * width, 1, 1, dtype=_HALF)
                    yield Work(small, count * _LATENT_BESIDES[self.engine.attention], "attention")
                if mixer.selected:
                    yield Work(
                        Gemm(own, mixer.index_heads * queries, context, mixer.index_dim, _HALF), count, "indexer"
                    )
            else:
                yield from self._linear_mixer(mixer, own, queries, count)

    def prompts(self, batch: int, queries: int, prior: int) -> Iterator[Work]:
        """Attention of ``batch`` prompts of one rank, of ``prior`` + ``queries`` tokens, ``prior`` of them cached."""
        tp = self.parallel.attention_tp
        for layer, count in self.model.layers:
            mixer = layer.mixer
            if isinstance(mixer, SoftmaxAttention):
                yield Work(self._softmax(mixer, batch, queries, queries + prior), count, "attention")
            elif isinstance(mixer, LatentAttention):
                heads = mixer.heads // tp
                wide = heads * (mixer.nope_dim + mixer.value_dim)
                yield Work(self._product(batch * (queries + prior), wide, mixer.kv_rank), count, "attention products")
                width = mixer.nope_dim + mixer.rope_dim
                prefill = Attention(batch, heads, queries, queries + prior, width, heads, True, _HALF,
                                    kernel=self._kernel(), value_dim=mixer.value_dim)  # fmt: skip
                yield Work(prefill, count, "attention")
            else:
                yield from self._linear_mixer(mixer, batch, queries, count)

    def _softmax(self, mixer: SoftmaxAttention, batch: int, queries: int, keys: int) -> Attention:
        tp = self.parallel.attention_tp
        return Attention(
            batch, mixer.heads // tp, queries, max(keys, queries), mixer.head_dim, max(mixer.kv_heads // tp, 1), True,
            _HALF, kernel=self.engine.attention, window=mixer.window, paged=True, cached=self._cached(),
        )  # fmt: skip

    def _cached(self) -> str:
        """Type of the cache, if of fewer than 16 bits."""
        return "float8" if self.precision.kv == "fp8" else ""

    def _linear_mixer(self, mixer: LinearMixer, batch: int, length: int, count: int) -> Iterator[Work]:
        tp = self.parallel.attention_tp
        yield Work(
            CausalConvolution(batch, mixer.channels // tp, length, mixer.convolution, _HALF, update=length == 1),
            count, "attention",
        )  # fmt: skip
        yield Work(
            LinearAttention(mixer.kind, batch, length, max(mixer.key_heads // tp, 1), mixer.key_dim,
                            max(mixer.value_heads // tp, 1), mixer.value_dim, keeps_states=True), count, "attention",
        )  # fmt: skip

    def _kernel(self) -> AttentionKernel:
        """Kernel that engines select for the prompts of latent attention on this GPU."""
        return {"hopper": "flash3", "blackwell": "cudnn"}.get(self.architecture, "flash2")  # type: ignore[return-value]
