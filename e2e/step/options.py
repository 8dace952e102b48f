"""Options of a step, one field each, grouped in records; :class:`StepOptions` holds all of them for capture, lowering
and the writer of parallel steps.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from costmodel.operators.expert_routing import BALANCED, ExpertRouting
from e2e.step.choices import (
    AttentionForm,
    Dtype,
    LinearAttentionForm,
    MemoryLayout,
    MixtureForm,
    Mode,
    OptimizerForm,
    instead_of,
)
from e2e.step.option_fields import Options, option
from e2e.step.precision import Precision
from e2e.step.routing_text import parse_routing, routing_text

if TYPE_CHECKING:  # imports NumPy, which command lines start without
    from costmodel.machines.machine_records import Machine
    from costmodel.operators.attention import AttentionKernel

MODEL_PANEL = "My model on N GPUs"
STEP_PANEL = "The step"


def _routing(value: str | ExpertRouting) -> ExpertRouting:
    return parse_routing(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class Routed(Options):
    """Options of every step whose operators are known one by one."""

    panel = STEP_PANEL

    compile: bool = option("Forward and backward by torch.compile.", default=False, default_text="no (eager)")
    routing: ExpertRouting = option(
        "How experts share tokens: balanced, power-law=1.2, capacity=1.25, or both with a comma.",
        default=BALANCED,
        read=_routing,
        write=routing_text,
    )


@dataclass(frozen=True, kw_only=True)
class Computed(Options):
    """Options of every step that is computed, not read from a recording."""

    panel = STEP_PANEL

    batch_size: int | None = option(
        "Samples per GPU and micro-batch; default: 1, of --script and --sharding their own.", default=None, least=1
    )
    dtype: Dtype | None = option(
        "Number type of the model; default: bfloat16 (float16 where the GPU has no such units) with FP32 master "
        "weights and states, of others than transformers float32. Autocast over FP32 weights (AMP): by a --script.",
        default=None,
        instead=instead_of,
        default_text="float32 (TF32 off)",
    )
    optimizer: OptimizerForm | None = option(
        "How parameters are updated where the model leaves it open: tensor lists operation by operation (foreach) "
        "or in one kernel (fused); default: foreach, as PyTorch does, or what --stack does.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class Captured(Routed, Computed):
    """Options of every PyTorch step that is captured without a GPU."""

    panel = STEP_PANEL

    sequence_length: int | None = option(
        "Tokens; default: the model's maximum, 4096 at most; of --script its own.", default=None, least=1
    )
    mode: Mode = option(
        "What one step does; inference is one forward pass over all tokens (see --cache-length).",
        default="train",
        default_text="train (forward, backward, optimizer)",
    )
    attention: AttentionForm | None = option(
        "flash: the kernel that PyTorch takes on the GPU; or one by name; eager, math: products and softmax "
        "apart. Default: flash where the model has it, or what --recipe says.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class LinearAttention(Options):
    """Options of linear-attention kernels; not available with --parallel."""

    panel = STEP_PANEL

    linear_attention: LinearAttentionForm | None = option(
        "Mamba and gated delta rules of Transformers: by the fused kernels of mamba_ssm, causal_conv1d and "
        "flash-linear-attention, or in single operators; default: fused where these are installed.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class Stack(Options):
    """Software stack of a transformer: recipe, kernels, precision, adapters."""

    panel = MODEL_PANEL

    recipe: str | None = option(
        "How it is trained, in one word: plain, hf-trainer, torchtitan, megatron, llm-foundry, deepspeed, "
        "pure-bf16 (vllm: inference). Says what is not asked for of --stack, --dtype, --attention and of --parallel; "
        "default: plain.",
        default=None,
    )
    stack: str | None = option(
        "Whose kernels a transformer has: huggingface, torchtitan, megatron, megatron-lm, te, liger, llm-foundry; "
        "default: what --recipe says.",
        default=None,
    )
    precision: Precision | None = option(
        "Linear layers trained in 8 bits by this recipe; --dtype bfloat16 is the rest.",
        default=None,
        instead=instead_of,
    )
    moe: MixtureForm = option(
        "Experts: fused permutation and grouped products (grouped), or as the library writes them.", default="grouped"
    )
    lora: int | None = option(
        "Rank of adapters of queries, keys and values; weights are frozen.", default=None, least=1
    )
    document_length: int | None = option(
        "Tokens of each document of which sequences are packed; it sees itself alone.", default=None, least=1
    )


@dataclass(frozen=True, kw_only=True)
class AloneOnGpu(Options):
    """Options of a model on a single GPU."""

    panel = MODEL_PANEL

    cache_length: int | None = option(
        "Tokens of each sequence that lie in a cache: the step decodes those of --sequence-length (1).",
        default=None,
        least=1,
    )
    layout: MemoryLayout = option(
        "How the images of a built-in model lie in memory: NCHW or NHWC.", default="contiguous"
    )


@dataclass(frozen=True)
class SeenGpu:
    """GPU properties that ``torch.cuda`` reports to a script: name, compute capability, memory in bytes,
    multiprocessors.

    The default is an A100, for captures that are priced on several machines.
    """

    name: str = "NVIDIA A100-SXM4-80GB"
    capability: tuple[int, int] = (8, 0)
    memory_bytes: int = 80 << 30
    multiprocessors: int = 108
    l2_bytes: int = 40 << 20


@dataclass(frozen=True)
class Tf32Switches:
    """Float32 operations that run in TF32: matrix ``products`` (cuBLAS), ``convolutions`` and ``recurrent`` networks
    (cuDNN); none by default.
    """

    products: bool = False
    convolutions: bool = False
    recurrent: bool = False

    def on(self, machine: Machine) -> Tf32Switches:
        """Return the switches that have an effect on ``machine``: none if it has no TF32 units."""
        return self if "tf32" in machine.compute else NO_TF32

    @property
    def described(self) -> str:
        """``TF32 off``, or the operations that run in TF32."""
        parts = (
            ("products", self.products),
            ("convolutions", self.convolutions),
            ("recurrent networks", self.recurrent),
        )
        *more, last = [name for name, is_on in parts if is_on] or [""]
        return f"TF32 in {', '.join(more)}{' and ' if more else ''}{last}" if last else "TF32 off"


NO_TF32 = Tf32Switches()


@dataclass(frozen=True, kw_only=True)
class StepOptions(AloneOnGpu, Stack, LinearAttention, Captured):
    """All options of a step, for capture, lowering and the writer of parallel steps.

    Options of all sources, each with its default for sources without it, and derived settings. ``attention`` ``None``:
    ``eager`` when a model is built, the kernels named by the trace when it is lowered. ``optimizer`` ``None``: as the
    stack does.
    """

    # float32 tensors with TF32 products are `tf32`; 16-bit types cast the whole built-in model, without a loss scaler.
    dtype: Dtype = option("Number type.", default="float32")
    # Float32 operations in TF32; None: products, if `dtype` is `tf32`.
    tf32: Tf32Switches | None = None
    # AdamW of a 16-bit transformer updates FP32 copies of the weights.
    master_weights: bool = False
    # Weights are gathered in 8 bits.
    weights_arrive: bool = False
    # Bucket size of gradients in MiB, overriding the script's argument of DDP (None: no override).
    bucket_mb: float | None = None
    # GPU reported to a script.
    seen_gpu: SeenGpu = SeenGpu()

    @classmethod
    def of(cls, asked: Options, **settled: Any) -> StepOptions:
        """Copy the step fields of ``asked``; values in ``settled`` take precedence."""
        names = [each.name for each in fields(cls) if hasattr(asked, each.name)]
        return cls(**{name: getattr(asked, name) for name in names} | settled)

    @property
    def form(self) -> AttentionForm:
        """Attention implementation for building a model."""
        return self.attention or "eager"

    @property
    def kernel(self) -> AttentionKernel | None:
        """Kernel of fused attention in the cost models; None: the kernel of the operator."""
        if self.attention is None:
            return None
        return "sdpa" if self.attention == "eager" or self.attention == "flash" else self.attention

    @property
    def inference(self) -> bool:
        """True if the step is a forward pass alone."""
        return self.mode == "inference"

    @property
    def switches(self) -> Tf32Switches:
        """Float32 operations in TF32."""
        return Tf32Switches(products=self.dtype == "tf32") if self.tf32 is None else self.tf32
