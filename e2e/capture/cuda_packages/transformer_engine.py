"""Transformer Engine: linear layers with norms before them, attention, transformer layers, in 16 bits or in 8 by a
recipe, and the kernels by which Megatron-LM uses it.

Products in 8 bits are those of :mod:`e2e.capture.models.layer_forms`, with the recipe of ``fp8_autocast``; layers that
ranks share are those of :mod:`e2e.capture.cuda_packages.parallel_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from costmodel.base.errors import ModelError
from e2e.capture.cuda_packages import apex
from e2e.capture.cuda_packages.flash_attention import lengths_of
from e2e.capture.cuda_packages.kernels import OPERATORS, attend, norm, one_pass
from e2e.capture.cuda_packages.parallel_layers import (
    ExpertProducts,
    Operands,
    Product,
    Sharing,
    attend_in_ring,
    sums_of,
)
from e2e.capture.distributed.zero import gather
from e2e.capture.models.layer_forms import Caster, ScaledLinear
from e2e.capture.models.stacks import PackedGated, Rotary, SquaredRelu
from e2e.step.options import RECIPES

# Casts of the recipe in use, or None outside ``fp8_autocast``.
_CASTER: ContextVar[Caster | None] = ContextVar("recipe of Transformer Engine", default=None)


class _Recipe:
    """Recipe of 8-bit training, with any settings."""

    name = "fp8-delayed"

    def __init__(self, *_: Any, **settings: Any) -> None:
        self.__dict__.update(settings)


class DelayedScaling(_Recipe):
    """Scales of earlier steps."""


class Float8CurrentScaling(_Recipe):
    """One scale of the tensor itself."""

    name = "fp8-current"


class Float8BlockScaling(_Recipe):
    """A scale for every block."""

    name = "fp8-block"


class MXFP8BlockScaling(_Recipe):
    """A scale for every 32 values."""

    name = "mxfp8"


class Format:
    """Formats of 8-bit floats."""

    E4M3, E5M2, HYBRID = "E4M3", "E5M2", "HYBRID"


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, *_: Any, **named: Any
) -> Iterator[None]:
    """Context in which linear layers multiply in 8 bits."""
    recipe = fp8_recipe or named.get("recipe")
    if enabled and torch.cuda.get_device_capability() < (8, 9):
        raise ModelError("fp8_autocast needs a GPU with units for 8-bit floats (Ada, Hopper, Blackwell)")
    token = _CASTER.set(Caster(RECIPES[recipe.name if recipe else "fp8-delayed"]) if enabled else None)
    try:
        yield
    finally:
        _CASTER.reset(token)


# True inside of an enabled `fp8_model_init`.
_STORES: ContextVar[bool] = ContextVar("weights of Transformer Engine in 8 bits", default=False)


@contextmanager
def fp8_model_init(enabled: bool = True, *_: Any, **__: Any) -> Iterator[None]:
    """Context in which layers store their weights in 8 bits, twice, the second time transposed; the optimizer updates
    them, and ranks gather them, as if they were of 16 bits.
    """
    token = _STORES.set(enabled)
    try:
        yield
    finally:
        _STORES.reset(token)


class FP8GlobalStateManager:
    """What the innermost ``fp8_autocast`` says."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """True inside of one that is enabled."""
        return _CASTER.get() is not None


def _linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    given, weight, bias = _as_autocast(given, weight, bias)
    caster = _CASTER.get()
    if caster is None or any(extent % 16 for extent in weight.shape):
        return F.linear(given, weight, bias)
    output: torch.Tensor = ScaledLinear.apply(given, weight, caster)
    return output if bias is None else output + bias


def _as_autocast(*given: Any) -> Any:
    if not torch.is_autocast_enabled("cuda"):
        return given
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(None if each is None else each.to(dtype) for each in given)


def _made(*shape: int, like: dict[str, Any]) -> nn.Parameter:
    device = like.get("device")
    place = "cuda" if device is None else device
    return nn.Parameter(torch.empty(*shape, device=place, dtype=like.get("params_dtype")))


class Linear(nn.Module):
    """Linear layer, whose weight the ranks of a group may share."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, *_: Any, **named: Any) -> None:
        super().__init__()
        self.tp_size = named.get("tp_size", 1) or 1
        self.parallel_mode = way = named.get("parallel_mode")
        self.sequence_parallel = bool(named.get("sequence_parallel")) and self.tp_size > 1
        self.in_features = in_features // self.tp_size if way == "row" else in_features
        self.out_features = out_features // self.tp_size if way == "column" else out_features
        self.weight = _made(self.out_features, self.in_features, like=named)
        self.bias = _made(self.out_features, like=named) if bias else None
        self.use_bias, self.returns_bias = bool(bias), bool(named.get("return_bias"))
        self.adds_gradients, self.tp_group = bool(named.get("fuse_wgrad_accumulation")), named.get("tp_group")
        self.save_original_input = False  # which Megatron-LM sets
        self._operands: Operands | None = None
        self.stores_eight = _STORES.get() and self.weight.element_size() == 2
        if way is not None:
            told = {"tensor_model_parallel": True, "partition_dim": 1 if way == "row" else 0, "partition_stride": 1}
            for name, value in told.items():
                setattr(self.weight, name, value)
                if self.bias is not None and way == "column":
                    setattr(self.bias, name, value)

    def set_tensor_parallel_group(self, group: Any) -> None:
        """Set the group of ranks that share the weight."""
        self.tp_group = group

    def forward(self, inp: torch.Tensor, is_first_microbatch: Any = None, **_: Any) -> Any:
        """Apply the layer."""
        bias = None if self.returns_bias else self.bias
        output = self._product(inp, bias, is_first_microbatch)
        return (output, self.bias) if self.returns_bias else output

    def _product(self, inp: torch.Tensor, bias: torch.Tensor | None, first: Any) -> torch.Tensor:
        sharing = Sharing(self.tp_group, self.parallel_mode, self.sequence_parallel)
        sums = sums_of(self.weight) if self.adds_gradients else None
        if sharing.size == 1 and sums is None and first is None:
            return _linear(inp, self.weight, bias)
        inp, weight, bias = _as_autocast(inp, self.weight, bias)
        caster = None if any(extent % 16 for extent in weight.shape) else _CASTER.get()
        operands: Operands | None = None
        if caster is not None:
            operands = self._operands
            if self.stores_eight:
                halves = weight.detach().view(torch.float8_e4m3fn).chunk(2, 1)
                operands = halves[0], halves[1]
            elif operands is None or first is not False:
                eight, turned = caster.operands(weight.detach())
                operands = self._operands = eight, eight if turned is None else turned
        output: torch.Tensor = Product.apply(inp, weight, sharing, caster, operands, sums, self.save_original_input)
        return output if bias is None else output + bias


class GroupedLinear(nn.Module):
    """Linear layers of the experts of a rank, over rows sorted by expert."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, *_: Any, **named: Any) -> None:
        super().__init__()
        if named.get("bias", True):
            raise ModelError("GroupedLinear with a bias has no stand-in; experts mostly have none")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.adds_gradients = bool(named.get("fuse_wgrad_accumulation"))
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", _made(out_features, in_features, like=named))

    def forward(self, inp: torch.Tensor, m_splits: Sequence[int], is_first_microbatch: Any = None, **_: Any) -> Any:
        """Apply the layer of each expert to its rows."""
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        sums = [sums_of(weight) if self.adds_gradients else None for weight in weights]
        return ExpertProducts.apply(inp, m_splits, _CASTER.get(), sums, *weights)


class LayerNorm(nn.Module):
    """Layer norm in one kernel."""

    kind = "layer_norm"

    def __init__(self, hidden_size: int, eps: float = 1e-5, **named: Any) -> None:
        super().__init__()
        named["params_dtype"] = named.get("params_dtype") or named.get("dtype")
        self.weight = _made(hidden_size, like=named)
        self.bias = _made(hidden_size, like=named) if self.kind == "layer_norm" else None
        for each in self.parameters():
            each.sequence_parallel = bool(named.get("sequence_parallel"))  # type: ignore[attr-defined]

    def forward(self, inp: torch.Tensor) -> Any:
        """Return the norm of the last dimension."""
        return norm(inp, self.kind, self.weight, self.bias)


class RMSNorm(LayerNorm):
    """RMS norm in one kernel."""

    kind = "rms_norm"


def _norm_of(kind: str, size: int, eps: float, named: dict[str, Any]) -> LayerNorm:
    return (RMSNorm if kind == "RMSNorm" else LayerNorm)(size, eps, **named)


class LayerNormLinear(Linear):
    """Norm and linear layer."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", **named: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, **named)
        kept = ("params_dtype", "device", "sequence_parallel")
        shared: dict[str, Any] = {key: named[key] for key in kept if key in named}
        made = _norm_of(normalization, in_features, eps, shared)
        self.layer_norm_weight, self.layer_norm_bias, self.kind = made.weight, made.bias, made.kind

    def forward(self, inp: torch.Tensor, is_first_microbatch: Any = None, **_: Any) -> Any:
        """Apply both."""
        return super().forward(norm(inp, self.kind, self.layer_norm_weight, self.layer_norm_bias), is_first_microbatch)


_GATED = ("swiglu", "geglu", "reglu", "qgeglu", "srelu_glu")


class LayerNormMLP(nn.Module):
    """Norm and two linear layers with an activation between them."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, bias: bool = True,
        normalization: str = "LayerNorm", activation: str = "gelu", **named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        size = (named.get("tp_size", 1) or 1) if named.get("set_parallel_mode") else 1
        inner = ffn_hidden_size // size
        shared: dict[str, Any] = {key: named[key] for key in ("params_dtype", "device") if key in named}
        made = _norm_of(normalization, hidden_size, eps, shared)
        self.layer_norm_weight, self.layer_norm_bias, self.kind = made.weight, made.bias, made.kind
        rows = 2 * inner if activation in _GATED else inner
        self.fc1_weight, self.fc2_weight = _made(rows, hidden_size, like=named), _made(hidden_size, inner, like=named)
        self.fc1_bias = _made(rows, like=named) if bias else None
        self.fc2_bias = _made(hidden_size, like=named) if bias else None

    def forward(self, inp: torch.Tensor, is_first_microbatch: Any = None, **_: Any) -> Any:
        """Apply all."""
        given = norm(inp, self.kind, self.layer_norm_weight, self.layer_norm_bias)
        hidden = _linear(given, self.fc1_weight, self.fc1_bias)
        if self.activation in _GATED:
            hidden = PackedGated.apply(hidden)
        elif self.activation == "srelu":
            hidden = SquaredRelu.apply(hidden)
        else:
            hidden = F.relu(hidden) if self.activation == "relu" else F.gelu(hidden, approximate="tanh")
        return _linear(hidden, self.fc2_weight, self.fc2_bias)


class DotProductAttention(nn.Module):
    """Attention by cuDNN's fused kernel; the output has heads and width in one dimension."""

    def __init__(
        self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: Any = None, attention_dropout: float = 0.1,
        qkv_format: str = "sbhd", attn_mask_type: str = "causal", window_size: Any = None, *_: Any,
        cp_group: Any = None, cp_comm_type: str = "p2p", **__: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.format, self.mask, self.window, self.dropout = qkv_format, attn_mask_type, window_size, attention_dropout
        self.set_context_parallel_group(cp_group, cp_comm_type=cp_comm_type)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Set the group of ranks that share the contexts."""
        self.contexts = None if cp_group is None or dist.get_world_size(cp_group) == 1 else cp_group
        if self.contexts is not None and cp_comm_type != "p2p":
            raise ModelError(f"context parallelism by {cp_comm_type!r} has no stand-in; choose cp_comm_type='p2p'")

    def forward(
        self, query_layer: Any, key_layer: Any, value_layer: Any, attention_mask: Any = None, qkv_format: Any = None,
        cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, *_: Any, attn_mask_type: Any = None,
        window_size: Any = None, core_attention_bias: Any = None, **__: Any,
    ) -> Any:  # fmt: skip
        """Attend in the format of sequence, batch, heads and width, batch first, or packed."""
        form = qkv_format or self.format
        operands = [query_layer, key_layer, value_layer]
        packed: list[int] = []
        if form == "thd":
            packed = lengths_of(cu_seqlens_q, query_layer.shape[0]) if cu_seqlens_q is not None else []
            operands = [each.unsqueeze(0) for each in operands]
        elif form == "sbhd":
            operands = [each.transpose(0, 1) for each in operands]
        size = window_size or self.window
        window = int(size[0]) + 1 if size and size[0] >= 0 else 0
        causal, dropout = "causal" in (attn_mask_type or self.mask), self.dropout if self.training else 0.0
        if self.contexts is not None:
            if form == "thd" or window:
                raise ModelError("packed or windowed attention over the contexts of several ranks has no stand-in")
            query, key, value = operands
            output = attend_in_ring(query, key, value, self.contexts, causal, kernel="cudnn", dropout=dropout)
        else:
            output = attend(
                *operands, kernel="cudnn", causal=causal, window=window, dropout=dropout, packed=packed,
                bias=core_attention_bias,
            )  # fmt: skip
        if form == "thd":
            output = output.squeeze(0)
        elif form == "sbhd":
            output = output.transpose(0, 1)
        return output.flatten(-2)


class MultiheadAttention(nn.Module):
    """Product of queries, keys and values (with a norm before it), attention, projection."""

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, *_: Any, num_gqa_groups: int | None = None,
        attn_mask_type: str = "causal", input_layernorm: bool = False, normalization: str = "LayerNorm",
        bias: bool = True, qkv_format: str = "sbhd", attention_type: str = "self", **named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        size = (named.get("tp_size", 1) or 1) if named.get("set_parallel_mode") else 1
        shared: dict[str, Any] = {key: named[key] for key in ("params_dtype", "device") if key in named}
        self.width = kv_channels or hidden_size // num_attention_heads
        self.heads = num_attention_heads // size
        self.kv_heads = (num_gqa_groups or num_attention_heads) // size
        rows = (self.heads + 2 * self.kv_heads) * self.width
        if input_layernorm:
            self.qkv: Any = LayerNormLinear(
                hidden_size, rows, layernorm_epsilon, bias, normalization=normalization, **shared
            )
        else:
            self.qkv = Linear(hidden_size, rows, bias, **shared)
        self.core_attention = DotProductAttention(
            num_attention_heads, self.width, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type
        )
        self.proj = Linear(self.heads * self.width, hidden_size, bias, **shared)

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, *_: Any, rotary_pos_emb: Any = None, **named: Any
    ) -> Any:
        """Attend to the states themselves."""
        whole = self.qkv(hidden_states).unflatten(-1, (-1, self.width))
        query, key, value = whole.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        if rotary_pos_emb is not None:
            tables = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query, key = Rotary.apply(query, *tables), Rotary.apply(key, *tables)
        kept = {name: each for name, each in named.items() if name in ("cu_seqlens_q", "attn_mask_type", "window_size")}
        return self.proj(self.core_attention(query, key, value, **kept))


class TransformerLayer(nn.Module):
    """Layer of a transformer."""

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1, *_: Any,
        self_attn_mask_type: str = "causal", kv_channels: int | None = None, normalization: str = "LayerNorm",
        bias: bool = True, activation: str = "gelu", attn_input_format: str = "sbhd", **named: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        kept = ("params_dtype", "device", "tp_size", "set_parallel_mode")
        shared = {key: named[key] for key in kept if key in named}
        self.dropout = hidden_dropout
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            num_gqa_groups=num_gqa_groups, attn_mask_type=self_attn_mask_type, input_layernorm=True,
            normalization=normalization, bias=bias, qkv_format=attn_input_format, **shared,
        )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, bias, normalization, activation, **shared
        )

    def forward(self, hidden_states: Any, attention_mask: Any = None, *_: Any, **named: Any) -> Any:
        """Apply the layer; bias, dropout and sum are one kernel in training."""
        kept = ("rotary_pos_emb", "cu_seqlens_q", "window_size")
        given = {name: each for name, each in named.items() if name in kept and each is not None}
        states = hidden_states + self._dropped(self.self_attention(hidden_states, attention_mask, **given))
        return states + self._dropped(self.layernorm_mlp(states))

    def _dropped(self, states: torch.Tensor) -> torch.Tensor:
        return F.dropout(states, self.dropout, self.training) if self.dropout else states


def checkpoint(function: Any, *given: Any, **named: Any) -> Any:
    """Run a function whose forward pass is computed again in the backward pass."""
    ours = ("distribute_saved_activations", "get_rng_state_tracker", "tp_group", "use_reentrant")
    kept = {name: each for name, each in named.items() if name not in ours}
    run = torch.utils.checkpoint.checkpoint
    return run(function, *given, use_reentrant=False, **kept)


def apply_rotary_pos_emb(given: torch.Tensor, freqs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Rotate by positions in one kernel."""
    return one_pass("rotary", given, freqs, kept=(1,))


class _SplitAlongDim(torch.autograd.Function):
    """Parts along a dimension, whose gradients are copied into one tensor."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, dimension: int, sizes: Any, *_: Any) -> tuple[torch.Tensor, ...]:
        ctx.dimension = dimension
        return tuple(given.split(list(sizes) if isinstance(sizes, list | tuple) else sizes, dimension))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return torch.cat(gradients, ctx.dimension), None, None, None


class _CrossEntropy(torch.autograd.Function):
    """Loss of each row over the words of all ranks: one kernel finds maximum and sum, one writes the gradient over the
    scores; the backward pass multiplies it by that of the loss.
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
        rows = scores.new_empty((scores.numel() // scores.shape[-1], 3), dtype=torch.float32)
        found = OPERATORS.one_pass("cross_entropy", [scores, labels], [rows])[0]
        if group is not None and dist.get_world_size(group) > 1:
            every = found.new_empty((dist.get_world_size(group) * found.shape[0], 3))
            gather(every, found, group=group)
        (gradient,) = OPERATORS.one_pass("cross_entropy", [scores, labels, found], [scores])
        ctx.save_for_backward(gradient)
        return torch.empty(labels.shape, dtype=torch.float32, device=scores.device)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return OPERATORS.one_pass("cross_entropy_backward", [gradient, gradients[0]], [gradient])[0], None, None


def parallel_cross_entropy(
    scores: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0, reduces: bool = False, group: Any = None,
    *_: Any, **named: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the loss of each row, or their mean."""
    group = named.get("dist_process_group", group)
    losses: torch.Tensor = _CrossEntropy.apply(scores, labels, group)
    return losses.mean() if reduces else losses


def get_cpu_offload_context(enabled: bool = False, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Return a context, and a function of the states between layers, that do nothing unless they are ``enabled``."""
    if enabled:
        raise ModelError("offload of activations by Transformer Engine has no stand-in; leave cpu_offloading out")
    return nullcontext(), lambda states: states


def get_dummy_wgrad(shape: Any, dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return a gradient without values, for a weight whose gradient has been added to others."""
    return torch.empty(shape, dtype=dtype, device="cuda")


def general_gemm(first: torch.Tensor, second: torch.Tensor, *_: Any, **named: Any) -> tuple[Any, None, None, None]:
    """Return a product of matrices given in columns: that of ``second`` and ``first``, as ``layout`` turns them."""
    layout, dtype = named.get("layout", "TN"), named.get("out_dtype") or first.dtype
    turned = (second.t() if layout[1] == "T" else second), (first.t() if layout[0] == "T" else first)
    product = torch.mm(*turned) if dtype is first.dtype else torch.mm(*turned, out_dtype=dtype)
    return product, None, None, None


class CudaRNGStatesTracker:
    """States of random numbers by name."""

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Any]:
        """Return all states."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        """Set all states."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state."""
        self.states_[name] = seed

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Context with the numbers of ``name``."""
        yield


_LAYERS = {
    each.__name__: each
    for each in (
        Linear, GroupedLinear, LayerNorm, RMSNorm, LayerNormLinear, LayerNormMLP, DotProductAttention,
        MultiheadAttention, TransformerLayer,
    )
}  # fmt: skip
_RECIPES = {
    each.__name__: each
    for each in (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, Format)
}
_PYTORCH = {
    **_LAYERS,
    "fp8_autocast": fp8_autocast,
    "autocast": fp8_autocast,
    "fp8_model_init": fp8_model_init,
    "quantized_model_init": fp8_model_init,
    "checkpoint": checkpoint,
}

_OPTIMIZERS = {
    "FusedAdam": apex.FusedAdam,
    "FusedSGD": apex.FusedSGD,
    "multi_tensor_applier": apex.multi_tensor_applier,
    **{name: apex.MODULES["amp_C"][name] for name in ("multi_tensor_l2norm", "multi_tensor_scale")},
}
_FP8 = {each.__name__: each for each in (fp8_autocast, fp8_model_init, FP8GlobalStateManager)}
_ROTATION = {"apply_rotary_pos_emb": apply_rotary_pos_emb}

_FILES = (".linear", ".grouped_linear", ".layernorm_linear", ".layernorm_mlp")

MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {},
    "transformer_engine.pytorch": _PYTORCH,
    "transformer_engine.pytorch.fp8": _FP8,
    **{f"transformer_engine.pytorch.module{part}": _LAYERS for part in ("", *_FILES)},
    "transformer_engine.pytorch.attention": {**_LAYERS, **_ROTATION, "_SplitAlongDim": _SplitAlongDim},
    "transformer_engine.pytorch.attention.rope": _ROTATION,
    "transformer_engine.pytorch.module.base": {
        "get_dummy_wgrad": get_dummy_wgrad,
        "get_workspace": lambda: None,
    },
    "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
    "transformer_engine.pytorch.cpu_offload": {"get_cpu_offload_context": get_cpu_offload_context},
    "transformer_engine.pytorch.cross_entropy": {"parallel_cross_entropy": parallel_cross_entropy},
    "transformer_engine.pytorch.distributed": {
        "CudaRNGStatesTracker": CudaRNGStatesTracker,
        "checkpoint": checkpoint,
    },
    "transformer_engine.pytorch.optimizers": _OPTIMIZERS,
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": {**_RECIPES, "Recipe": _Recipe},
}
