"""Training stacks (``--stack``): their kernels for a Hugging Face model, and their storage of weights and optimizer.

A stack changes the model before it is captured: modules are replaced by those with its kernels. Comments name the
sources; everything else runs as the library writes it. Imports ``torch``.

A fused kernel replaces several operators: a capture records one call per launch. Bytes moved:
:mod:`e2e.lowering.families.library_kernels`. Sources: transformer_engine (swiglu, fused_rope, cross_entropy in Triton),
Megatron-Core's fusions, flash-attn's cross entropy, linkedin/Liger-Kernel (swiglu, rope, fused_linear_cross_entropy).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.step.options import OptimizerForm

_LIBRARY = torch.library.Library("stack", "DEF")
_ALIKE = (
    "squared_relu(Tensor given) -> Tensor",
    "squared_relu_backward(Tensor gradient, Tensor given) -> Tensor",
    "rotary(Tensor given, Tensor cosines, Tensor sines) -> Tensor",
    "rotary_backward(Tensor gradient, Tensor cosines, Tensor sines) -> Tensor",
    "gated(Tensor gate, Tensor given) -> Tensor",
)
for _schema in _ALIKE:
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], lambda first, *others: torch.empty_like(first), "Meta")
_LIBRARY.define("gated_backward(Tensor gradient, Tensor gate, Tensor given) -> (Tensor, Tensor)")
_LIBRARY.impl("gated_backward", lambda gradient, gate, given: (torch.empty_like(gate), torch.empty_like(given)), "Meta")
_LIBRARY.define("packed_gated(Tensor both) -> Tensor")
_LIBRARY.impl("packed_gated", lambda both: both.new_empty((*both.shape[:-1], both.shape[-1] // 2)), "Meta")
_LIBRARY.define("packed_gated_backward(Tensor gradient, Tensor both) -> Tensor")
_LIBRARY.impl("packed_gated_backward", lambda gradient, both: torch.empty_like(both), "Meta")
_LIBRARY.define("cross_entropy(Tensor scores, Tensor labels) -> (Tensor, Tensor)")
_LIBRARY.impl(
    "cross_entropy",
    lambda scores, labels: tuple(scores.new_empty(scores.shape[:-1], dtype=torch.float32) for _ in range(2)),
    "Meta",
)
_LIBRARY.define("cross_entropy_backward_(Tensor(a!) scores, Tensor labels, Tensor sums, Tensor gradient) -> ()")
_LIBRARY.impl("cross_entropy_backward_", lambda scores, labels, sums, gradient: None, "Meta")
_ops = torch.ops.stack


class SquaredRelu(torch.autograd.Function):
    """Square of ``relu``, in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given)
        return _ops.squared_relu(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _ops.squared_relu_backward(gradients[0], *ctx.saved_tensors)


class Rotary(torch.autograd.Function):
    """Rotary embedding of queries or of keys; only the tables are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return _ops.rotary(given, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _ops.rotary_backward(gradients[0], *ctx.saved_tensors), None, None


class Gated(torch.autograd.Function):
    """Gated activation ``activation(gate) * given``."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, given)
        return _ops.gated(gate, given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _ops.gated_backward(gradients[0], *ctx.saved_tensors)


class PackedGated(torch.autograd.Function):
    """Gated activation of the two halves of one product's output."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        return _ops.packed_gated(both)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _ops.packed_gated_backward(gradients[0], *ctx.saved_tensors)


class SplitColumns(torch.autograd.Function):
    """Parts of one product's output, whose gradients are written directly into the whole gradient
    (``SplitAlongDim``).
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
        ctx.shape = whole.shape
        return tuple(whole.split(sizes, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0].new_empty(ctx.shape), *(None for _ in gradients))


class FusedCrossEntropy(torch.autograd.Function):
    """Losses (tokens,) of scores (tokens, words); their gradient overwrites the scores."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses, sums = _ops.cross_entropy(scores, labels)
        ctx.save_for_backward(scores, labels, sums)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scores, labels, sums = ctx.saved_tensors
        _ops.cross_entropy_backward_(scores, labels, sums, gradients[0])
        return scores, None


class WideCrossEntropy(torch.autograd.Function):
    """Losses (tokens,) by PyTorch's operators in place on one FP32 copy of the scores (tokens, words), which becomes
    their gradient (``_VocabParallelCrossEntropy`` of Megatron-Core's tensor_parallel/cross_entropy.py).
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = scores.float()
        wide.sub_(wide.amax(-1, keepdim=True))
        chosen = wide.gather(1, labels.unsqueeze(1)).squeeze(1)
        total = wide.exp_().sum(-1)
        ctx.save_for_backward(wide.div_(total.unsqueeze(1)), labels)
        ctx.dtype = scores.dtype
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        wide, labels = ctx.saved_tensors
        wide.scatter_add_(1, labels.unsqueeze(1), wide.new_full((len(labels), 1), -1.0))
        return wide.mul_(gradients[0].unsqueeze(1)).to(ctx.dtype), None


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss together, a few tokens at a time, with the gradients computed in the forward pass
    (``LigerFusedLinearCrossEntropyFunction``): the scores of all tokens never exist at once.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
        losses = states.new_empty(states.shape[0], dtype=torch.float32)
        for begin, end in chunks(states.shape[0], weight.shape[0], states.shape[1]):
            part = states[begin:end]
            scores = torch.mm(part, weight.t())
            _, sums = _ops.cross_entropy(scores, labels[begin:end])
            _ops.cross_entropy_backward_(scores, labels[begin:end], sums, sums)
            torch.mm(scores, weight, out=of_states[begin:end])
            torch.addmm(of_weight, scores.t(), part, out=of_weight)
        ctx.save_for_backward(of_states, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_states, of_weight = ctx.saved_tensors
        return of_states, of_weight, None


def chunks(tokens: int, words: int, width: int) -> Sequence[tuple[int, int]]:
    """Return (begin, end) of the chunks of tokens.

    The number of chunks is the ratio of vocabulary to width of the states, with a power of two of tokens each
    (``fused_linear_cross_entropy_forward`` of Liger-Kernel).
    """
    parts = -(-words // width)
    size = 1 << (-(-tokens // parts) - 1).bit_length()
    return [(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


Loss = Literal["plain", "fused", "wide", "chunked"]


@dataclass(frozen=True)
class Stack:
    """Kernels and settings of a training stack."""

    about: str
    # Norms, rotary embeddings and activations of the MLP are one kernel each way.
    fused: bool = False
    # Queries, keys and values are one product, gate and up another.
    packed: bool = False
    # Cross entropy as in PyTorch, in one kernel each way, in one FP32 copy of the scores, or together with the head and
    # a few tokens at a time.
    loss: Loss = "plain"
    # One kernel, instead of PyTorch's default.
    fused_optimizer: bool = False
    # Products of weight gradients accumulate in place, in FP32.
    accumulates: bool = False
    # Recomputation of a layer stops at the last operator needed.
    stops_early: bool = False
    # Number of additional cross entropies per micro-batch, forward in FP32, that the trainer reports.
    metrics: int = 0
    # Products of a mixture of experts are one launch per expert.
    by_expert: bool = False
    # ``--compile`` includes the parts before and after the layers.
    ends_compiled: bool = True
    # The launcher sets the allocator's ``expandable_segments``.
    expandable: bool = False
    # The last layer, which the backward pass begins with, stays whole after its forward pass where FSDP reshards the
    # others.
    keeps_last: bool = False
    # Pipelines are those of ``torch.distributed.pipelining``, with FSDP stages.
    pipelining: bool = False
    # With ``tp`` the loss is DTensor's.
    loss_parallel: bool = False
    # Gradients are clipped by their norm before every optimizer step.
    clips: bool = False
    # ``zero=3`` with the optimizer on the host is DeepSpeed's (``offload_optimizer``): 16-bit shards stay on the GPU.
    shards_stay: bool = False
    # Its PyTorch and CUDA are years older than those of the kernel measurements (:mod:`e2e.price.speed_band`).
    older_libraries: bool = False

    @property
    def optimizer_form(self) -> OptimizerForm:
        """Default form of the optimizer."""
        return "fused" if self.fused_optimizer else "foreach"


STACKS: dict[str, Stack] = {
    # transformers.Trainer: adamw_torch_fused and max_grad_norm=1.0 by default, checkpointing without re-entrance.
    "huggingface": Stack(
        "as transformers' Trainer runs it", fused_optimizer=True, stops_early=True, clips=True, shards_stay=True
    ),
    # pytorch/torchtitan: FSDP2 with MixedPrecisionPolicy over FP32 parameters, fused AdamW, checkpoint_wrapper without
    # re-entrance. Its rotation by complex numbers in FP32 moves as many bytes as the library's, its norms upcast too.
    # Each TransformerBlock is compiled (apply_compile of parallelize_llama.py); the loss was not before 2025, a comment
    # in its train.py says why. run_llama_train.sh sets PYTORCH_CUDA_ALLOC_CONF. apply_fsdp leaves the last layer whole
    # and, in a pipeline, all of them.
    "torchtitan": Stack(
        "torchtitan with FSDP2",
        fused_optimizer=True, stops_early=True, ends_compiled=False, expandable=True, keeps_last=True, pipelining=True,
        loss_parallel=True, clips=True,  # max_norm = 1.0 of its job_config.py
    ),
    # Megatron-Core with Transformer Engine, as NeMo and Megatron-Bridge run it: bias_swiglu, rope and cross entropy
    # fusions, SplitAlongDim, gradient_accumulation_fusion, FusedAdam with FP32 master weights, clip_grad = 1.0.
    "megatron": Stack(
        "Megatron-Core with Transformer Engine (NeMo, Megatron-Bridge)",
        fused=True, packed=True, loss="fused", fused_optimizer=True, accumulates=True, by_expert=True,
        clips=True,
    ),
    # pretrain_gpt.py of Megatron-LM without --cross-entropy-loss-fusion, its default.
    "megatron-lm": Stack(
        "Megatron-LM with Transformer Engine and its own cross entropy",
        fused=True, packed=True, loss="wide", fused_optimizer=True, accumulates=True, by_expert=True,
        clips=True,
    ),
    # Transformer Engine's TransformerLayer in a custom loop.
    "te": Stack(
        "Transformer Engine's layers in PyTorch", fused=True, packed=True, fused_optimizer=True, by_expert=True
    ),
    # linkedin/Liger-Kernel over transformers' modules.
    "liger": Stack(
        "transformers with Liger-Kernel",
        fused=True, loss="chunked", fused_optimizer=True, stops_early=True, clips=True, shards_stay=True,
    ),
    # mosaicml/llm-foundry: loss_fn fused_crossentropy, training metrics LanguageCrossEntropy and LanguagePerplexity
    # (ComposerMosaicGPT), FSDP over FP32 parameters, PyTorch of before early stopping: 1.13 and 2.0 in the images of
    # its tables, of H100 a nightly 2.1 with CUDA 12.1 (scripts/train/benchmarking/README.md, h100new.md). Its
    # configurations clip (gradient_clipping, clipping_type: norm, of scripts/train/yamls/pretrain).
    "llm-foundry": Stack(
        "llm-foundry with Composer and FSDP", loss="fused", metrics=2, clips=True, older_libraries=True
    ),
}  # fmt: skip


def stack_of(name: str | None) -> Stack:
    """Return the stack ``name``, or for None one that leaves every operator as captured; raise ``InputError`` for an
    unknown name.
    """
    if name is None:
        return Stack("as captured")
    if name not in STACKS:
        raise InputError(f"--stack {name}: choose one of {', '.join(STACKS)}")
    return STACKS[name]


def apply_stack(model: Any, stack: Stack, source: str) -> None:
    """Replace modules of a Hugging Face ``model`` on the meta device, before it is split or captured."""
    if stack.packed:
        _pack_products(model)
    if stack.fused:
        _fuse_norms(model)
        _fuse_activations(model)
        _fuse_rotations(model)
    if stack.loss == "fused" and hasattr(model, "loss_function"):
        model.loss_function = _fused_loss
        if stack.metrics:
            _report_metrics(model, stack.metrics)
    if stack.loss == "wide" and hasattr(model, "loss_function"):
        model.loss_function = _wide_loss
    if stack.loss == "chunked":
        _chunk_loss(model, source)


# --- modules ----------------------------------------------------------------------------------------


def _fuse_norms(model: nn.Module) -> None:
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm") and isinstance(getattr(module, "weight", None), nn.Parameter):
            module.forward = _rms_norm(module)
        elif name == "NemotronLayerNorm1P":  # the 1 is added inside the kernel (zero_centered_gamma)
            module.forward = _layer_norm(module)


def _rms_norm(module: Any) -> Callable[..., torch.Tensor]:
    return lambda given: nn.functional.rms_norm(
        given, module.weight.shape, module.weight, getattr(module, "variance_epsilon", None)
    )


def _layer_norm(module: Any) -> Callable[..., torch.Tensor]:
    return lambda given: nn.functional.layer_norm(
        given, module.normalized_shape, module.weight, module.bias, module.eps
    )


def _fuse_activations(model: nn.Module) -> None:
    for module in model.modules():
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in GATED):
            module.forward = _gated(module)
        if type(module).__name__ == "ReLUSquaredActivation":
            module.forward = SquaredRelu.apply
        if type(module).__name__ in COMPOSED_GELUS:  # six or so operators in the library
            module.forward = partial(nn.functional.gelu, approximate="tanh")


COMPOSED_GELUS = ("NewGELUActivation", "FastGELUActivation")
GATED = ("gate_proj", "up_proj", "down_proj")


def _gated(module: Any) -> Callable[..., torch.Tensor]:
    return lambda given: module.down_proj(Gated.apply(module.gate_proj(given), module.up_proj(given)))


def _fuse_rotations(model: nn.Module) -> None:
    """Replace the rotation function in the attention modules' own files, where they look it up."""
    for module in model.modules():
        home = sys.modules[type(module).__module__]
        if type(module).__name__.endswith("Attention") and hasattr(home, "apply_rotary_pos_emb"):
            module.forward = _rotating(module.forward, home)


def _rotating(forward: Callable[..., Any], home: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with patch.object(home, "apply_rotary_pos_emb", _rotate):
            return forward(*args, **kwargs)

    return run


def _rotate(query: torch.Tensor, key: torch.Tensor, cosines: Any, sines: Any, *_: Any, **__: Any) -> Any:
    return Rotary.apply(query, cosines, sines), Rotary.apply(key, cosines, sines)


# --- products ---------------------------------------------------------------------------------------

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _pack_products(model: nn.Module) -> None:
    for module in list(model.modules()):
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in PROJECTIONS):
            _pack_attention(module)
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in GATED):
            _pack_gated(module)


def _packed(parts: list[Any]) -> nn.Linear:
    """Return one product with the outputs of ``parts`` side by side."""
    first = parts[0].weight
    rows = sum(part.weight.shape[0] for part in parts)
    with torch.device("meta"):
        return nn.Linear(first.shape[1], rows, bias=parts[0].bias is not None, dtype=first.dtype)


def _pack_attention(module: Any) -> None:
    parts = [getattr(module, name) for name in PROJECTIONS]
    widths = [part.weight.shape[0] for part in parts]
    module.packed_proj = _packed(parts)
    made: list[torch.Tensor] = []
    for place, name in enumerate(PROJECTIONS):
        setattr(module, name, _PartOfProduct((module,), tuple(widths), place, made))


class _PartOfProduct(nn.Module):
    """Placeholder of one of three products; the first one called runs the packed product."""

    def __init__(self, owner: tuple[Any], widths: tuple[int, ...], place: int, made: list[torch.Tensor]) -> None:
        super().__init__()
        self.owner, self.widths, self.place, self.made = owner, widths, place, made

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.place == 0:
            whole = self.owner[0].packed_proj(given)
            sizes = [width * whole.shape[-1] // sum(self.widths) for width in self.widths]  # a rank has its share
            self.made[:] = SplitColumns.apply(whole, *sizes)
        part = self.made[self.place]
        if self.place == len(self.widths) - 1:
            self.made.clear()  # references here would never be freed
            # Queries and keys are new tensors after rotation. Values are copied, as Transformer Engine's
            # DotProductAttention does with non-contiguous tensors, so that the product's whole output is not kept.
            return part.contiguous()
        return part


def _pack_gated(module: Any) -> None:
    module.gate_up_proj = _packed([module.gate_proj, module.up_proj])
    del module.gate_proj, module.up_proj
    module.forward = lambda given: module.down_proj(PackedGated.apply(module.gate_up_proj(given)))


# --- loss -------------------------------------------------------------------------------------------


def _fused_loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    losses: torch.Tensor = FusedCrossEntropy.apply(logits.view(-1, logits.shape[-1]), labels.view(-1))
    return losses.mean()


def _report_metrics(model: Any, count: int) -> None:
    """Run the metrics' cross entropies of a micro-batch after its backward pass (``_train_microbatch`` of Composer's
    trainer updates metrics there), when the scores are the only remaining activations.
    """
    scored: list[tuple[torch.Tensor, torch.Tensor]] = []
    embedding, loss = model.get_input_embeddings(), model.loss_function
    embed = embedding.forward

    def keeping(logits: torch.Tensor, labels: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        scored[:] = [(logits.detach().view(-1, logits.shape[-1]), labels.view(-1))]
        return loss(logits, labels, *others, **named)

    def report() -> None:
        for scores, labels in scored:
            for _metric in range(count):
                nn.functional.cross_entropy(scores.float(), labels)
        scored.clear()

    model.loss_function = keeping
    embedding.forward = lambda *given: _Behind.apply(embed(*given), report)


class _Behind(torch.autograd.Function):
    """Callback ``after`` at the end of the backward pass of all later operators."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, after: Callable[[], None]) -> torch.Tensor:
        ctx.after = after
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.after()
        return gradients[0], None


def _wide_loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    losses: torch.Tensor = WideCrossEntropy.apply(logits.view(-1, logits.shape[-1]), labels.view(-1))
    return losses.mean()


def _chunk_loss(model: Any, source: str) -> None:
    """Make the head pass on its input, and the loss run both head and loss."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not hasattr(model, "loss_function"):
        raise InputError(f"{source}: has no head and loss of a causal language model; use another --stack")
    head.forward = lambda given: given.view_as(given)

    def loss(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        found: torch.Tensor = ChunkedCrossEntropy.apply(logits.view(-1, logits.shape[-1]), head.weight, labels.view(-1))
        return found

    model.loss_function = loss
