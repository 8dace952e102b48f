"""Options that several requests have, one field each, grouped in records: of the step and of its hardware.

:class:`StepOptions` holds all of the step for capture, lowering and the writer of parallel steps. With the values that
options take: fixed choices, the text of ``--routing`` (``balanced``, ``power-law=1.2``, ``capacity=1.25``, or both of
the latter separated by a comma), the reference to a script (``FILE.py:FUNCTION``, or the function itself), and recipes
of 8-bit training.

Recipes (:class:`Recipe`) say what is cast, with which scales and how often. torchao (``float8`` training) casts weights
in every pass, Transformer Engine once per step. Delayed scaling uses the scale of earlier steps and finds the maximum
during the cast; scaling by the current tensor reads it twice; scales of rows, blocks and groups of 32 values are found
in the casting kernel. All three products of a linear layer are in 8 bits; the head, the router, attention, norms and
the optimizer are unchanged. Block scales: DeepSeek-V3 (arXiv 2412.19437, section 3.3). MX: OCP Microscaling Formats
1.0, on GPUs from Blackwell on.

Command lines import this module at their start: no frameworks here.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from costmodel.base.errors import InputError
from costmodel.base.units import whole_number
from costmodel.machines.machine_records import Machine
from costmodel.operators.experts import BALANCED, ExpertRouting
from e2e.step.option_fields import Options, option

if TYPE_CHECKING:
    from costmodel.operators.attention import AttentionKernel


# Mode of a step: with optimizer step, without it, or the forward pass alone in evaluation mode.
Mode = Literal["train", "forward-backward", "inference"]
# Number type of the model; ``tf32``: float32 tensors whose matrix products run on TF32 units.
Dtype = Literal["float32", "tf32", "bfloat16", "float16"]
# Names of number types in other tools -> advice for the user.
_SHORT = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
_MIXED = (
    "a transformer in bfloat16 or float16 keeps FP32 master weights as --recipe says; autocast over FP32 weights (AMP) "
    "is predicted of a --script that enters torch.autocast, not of built-in models"
)
_FOUR_BITS = (
    "weights of 4 bits (QLoRA, NF4) are not predicted: no table has their products; --lora RANK trains adapters beside "
    "frozen weights of 16 bits"
)
_EIGHT_BITS = "linear layers train in 8 bits by --precision, such as fp8-tensorwise, with --dtype bfloat16"
_INSTEAD = {
    **{name: f"write {dtype}" for name, dtype in _SHORT.items()},
    **dict.fromkeys(("amp", "autocast", "mixed", "mixed-precision"), _MIXED),
    **dict.fromkeys(("qlora", "nf4", "fp4", "int4", "4bit", "nvfp4", "mxfp4"), _FOUR_BITS),
    **dict.fromkeys(("fp8", "float8", "int8", "mxfp8"), _EIGHT_BITS),
}


def instead_of(name: str) -> str | None:
    """Return advice for the unsupported number type or precision ``name``, or None if no tool has such a name."""
    return _INSTEAD.get(name.lower())


# Attention implementation: separate products and softmax, as in the library (``eager``) or in PyTorch (``math``); the
# kernel that ``scaled_dot_product_attention`` selects on the GPU (``flash``); or a kernel by name: FlashAttention 1
# (Triton's too) to 4, cuDNN, the memory-efficient kernel; ``mla``: latent attention over cached latents, as serving
# engines decode; ``flash3-fp8``: FlashAttention 3 over an 8-bit cache, forward only.
AttentionForm = Literal[
    "eager", "flash", "flash1", "flash2", "flash3", "flash3-fp8", "flash4", "cudnn", "efficient", "mla", "math"
]
# Memory layout of image batches: NCHW, or NHWC (``torch.channels_last``).
MemoryLayout = Literal["contiguous", "channels-last"]
# Expert implementation: fused permutation and grouped products, or the code of Hugging Face's library.
MixtureForm = Literal["grouped", "huggingface"]
# Linear attention (Mamba, gated delta rules): kernels of the libraries that fuse it, or single operators.
LinearAttentionForm = Literal["fused", "unfused"]
# Optimizer implementation if the model does not set one: tensor lists, operation by operation (PyTorch's default on
# GPUs), or one kernel.
OptimizerForm = Literal["foreach", "fused"]


Precision = Literal["fp8-tensorwise", "fp8-rowwise", "fp8-delayed", "fp8-current", "fp8-block", "mxfp8"]


@dataclass(frozen=True)
class Recipe:
    """Recipe of 8-bit training."""

    name: Precision
    # Values that share a scale (:mod:`costmodel.operators.device_work`).
    scaling: Literal["tensor", "row", "block", "mx"]
    # True if a separate pass searches for the maximum.
    search: bool
    # True if one cast also writes the transposed copy for the gradients; otherwise operands are cast again, in the
    # other direction, when the gradients need them.
    both: bool
    # True if cast weights are kept for a whole step.
    weights_kept: bool
    # True if products of experts are in 8 bits as well.
    experts: bool


# torchao: float8/config.py (recipes tensorwise, rowwise) of pytorch/ao. Transformer Engine: DelayedScaling,
# Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling of transformer_engine/common/recipe.
RECIPES: dict[str, Recipe] = {
    each.name: each
    for each in (
        Recipe("fp8-tensorwise", "tensor", True, False, False, False),
        Recipe("fp8-rowwise", "row", False, False, False, False),
        Recipe("fp8-delayed", "tensor", False, True, True, True),
        Recipe("fp8-current", "tensor", True, True, True, True),
        Recipe("fp8-block", "block", False, True, True, True),
        Recipe("mxfp8", "mx", False, True, True, True),
    )
}


def check_units(name: str | None, machine: Machine) -> None:
    """Raise ``InputError`` if ``machine`` has no units for the recipe ``name``."""
    if name is None or name not in RECIPES:
        return
    if "float8" not in machine.compute:
        known = ", ".join(machine.compute)
        raise InputError(
            f"--precision {name}: {machine.name} has no rate for float8 ({known}); leave it "
            "out, or choose a GPU that has one"
        )
    if RECIPES[name].scaling == "mx" and not machine.chip().architecture.startswith("blackwell"):
        raise InputError(
            f"--precision {name}: {machine.name} has no units for MX formats, which came with Blackwell; choose "
            "fp8-block, or a GPU such as b200-sxm"
        )


def recipe_of(name: str | None, dtype: str) -> Recipe | None:
    """Return the recipe ``name``; raise ``InputError`` if it is unknown or the model is not 16-bit."""
    if name is None:
        return None
    if name not in RECIPES:
        raise InputError(f"precision {name!r} is not known; choose one of {', '.join(get_args(Precision))}")
    if dtype not in ("bfloat16", "float16"):
        raise InputError(f"--precision {name} is for models of 16 bits; give --dtype bfloat16")
    return RECIPES[name]


def named_values(option: str, text: str, known: Collection[str]) -> dict[str, str]:
    """Return the values of ``NAME=VALUE,...``; raise ``InputError`` for a name that is unknown or given twice."""
    found: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            near = difflib.get_close_matches(name, set(known) - {name}, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{option} {part}: {hint}write NAME=VALUE with {', '.join(known)}")
        if name in found:
            raise InputError(f"{option} {name}: is given twice; leave one out")
        found[name] = value
    return found


def named_counts(option: str, text: str, known: Collection[str]) -> dict[str, int]:
    """Return the values of ``NAME=COUNT,...``, whole numbers of at least 1."""
    found: dict[str, int] = {}
    for name, value in named_values(option, text, known).items():
        found[name] = whole_number(value) or 0
        if not found[name]:
            raise InputError(f"{option} {name}={value}: must be a whole number of at least 1")
    return found


ROUTING_FIELDS = {"power-law": "alpha", "capacity": "capacity", "drawn": "spread"}


def routing_text(routing: ExpertRouting) -> str:
    """Return the ``--routing`` text of ``routing``; the inverse of :func:`parse_routing`."""
    values = {name: getattr(routing, field) for name, field in ROUTING_FIELDS.items()}
    default = ExpertRouting()
    told = [f"{name}={value:g}" for name, value in values.items() if value != getattr(default, ROUTING_FIELDS[name])]
    return ",".join(told) or "balanced"


def parse_routing(text: str) -> ExpertRouting:
    """Parse the text of ``--routing``; raise ``InputError`` naming the wrong part."""
    values: dict[str, float] = {}
    for part in (piece.strip() for piece in text.split(",")):
        name, separator, number = part.partition("=")
        if part == "balanced":
            continue
        if name not in ROUTING_FIELDS or not separator:
            raise InputError(
                f"--routing {text!r}: {part!r} is none of balanced, power-law=1.2, drawn=1, capacity=1.25; write one "
                "of these"
            )
        try:
            value = float(number)
        except ValueError:
            raise InputError(f"--routing {text!r}: {name}={number} is no number; write such as {name}=1.25") from None
        if not 0 < value < float("inf") and not (name == "drawn" and value == 0):
            raise InputError(f"--routing {text!r}: {name} must be more than 0")
        if ROUTING_FIELDS[name] in values:
            raise InputError(f"--routing {text!r}: {name} is given twice; leave one out")
        values[ROUTING_FIELDS[name]] = value
    return ExpertRouting(**values)


MODEL_PANEL = "My model on N GPUs"
STEP_PANEL, MACHINE_PANEL = "The step", "The machine"
GPU_HELP = (
    "GPU or cluster: a name (`python -m costmodel machines`) or a YAML file. For a recorded run the GPU "
    "it ran on, if its profile does not say."
)
GPUS_HELP = "GPUs of the job; without --parallel a transformer is spread in the way predicted to be fastest."


def _routing(value: str | ExpertRouting) -> ExpertRouting:
    return parse_routing(value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(Options):
    """Options of every step whose operators are known one by one."""

    panel = STEP_PANEL

    compile: bool = option(
        "Compile the forward and backward passes (torch.compile).", default=False, default_text="no (eager)"
    )
    routing: ExpertRouting = option(
        "Distribution of tokens over experts: balanced, power-law=1.2, capacity=1.25, or both with a comma.",
        default=BALANCED,
        read=_routing,
        write=routing_text,
    )


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(Options):
    """Options of every step that is computed, not read from a recording."""

    panel = STEP_PANEL

    batch_size: int | None = option(
        "Samples per GPU and micro-batch; default: 1, or the script's or plan's own.", default=None, least=1
    )
    dtype: Dtype | None = option(
        "Number type of the model. Default: bfloat16 (float16 on GPUs without it) with FP32 master weights "
        "for transformers, float32 for other models. Autocast (AMP) is for --script.",
        default=None,
        instead=instead_of,
        default_text="float32 (TF32 off)",
    )
    optimizer: OptimizerForm | None = option(
        "Optimizer where the model leaves it open: a kernel per operation (foreach) or one for all (fused); "
        "default: foreach, or as --stack does.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(OperatorOptions, ComputeOptions):
    """Options of every PyTorch step that is captured without a GPU."""

    panel = STEP_PANEL

    sequence_length: int | None = option(
        "Tokens of a sequence; default: the model's maximum, at most 4096, or the script's own.", default=None, least=1
    )
    mode: Mode = option(
        "Training step, the same without its optimizer, or one forward pass over all tokens (inference; see "
        "--cache-length).",
        default="train",
        default_text="train (forward, backward, optimizer)",
    )
    attention: AttentionForm | None = option(
        "Attention kernel: flash is what PyTorch selects on the GPU; eager and math are separate products and "
        "softmax. Default: flash where the model has it, or as --recipe says.",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class LinearAttentionOptions(Options):
    """Options of linear-attention kernels; not available with --parallel."""

    panel = STEP_PANEL

    linear_attention: LinearAttentionForm | None = option(
        "Mamba and gated delta rules: fused kernels (mamba_ssm, causal_conv1d, flash-linear-attention) or "
        "single operators; default: fused where these are installed.",
        default=None,
    )


def _share(value: float) -> float:
    if not 0 < value <= 1:
        raise InputError(f"--selected {value:g}: must be more than 0 and at most 1")
    return value


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(Options):
    """Options of code whose sizes depend on data."""

    panel = STEP_PANEL

    selected: float = option(
        "Share of what selections by data (boolean masks, nonzero, unique, NMS) could find that they do, such as 0.1.",
        default=1.0,
        read=_share,
        default_text="1 (all)",
    )


@dataclass(frozen=True, kw_only=True)
class StackOptions(Options):
    """Software stack of a transformer: recipe, kernels, precision, adapters."""

    panel = MODEL_PANEL

    recipe: str | None = option(
        "Way to train: plain (default), hf-trainer, torchtitan, megatron, llm-foundry, deepspeed, pure-bf16; "
        "vllm for inference. Sets what is not given of --stack, --dtype, --attention and --parallel.",
        default=None,
    )
    stack: str | None = option(
        "Kernels of a transformer: huggingface, torchtitan, megatron, megatron-lm, te, liger, llm-foundry; "
        "default: those of --recipe.",
        default=None,
    )
    precision: Precision | None = option(
        "Train linear layers in 8 bits by this recipe, with --dtype bfloat16.",
        default=None,
        instead=instead_of,
    )
    moe: MixtureForm = option(
        "Expert layers: fused permutation and grouped products, or the code of Hugging Face.", default="grouped"
    )
    lora: int | None = option(
        "Train adapters of this rank on queries, keys and values; other weights are frozen.", default=None, least=1
    )
    document_length: int | None = option(
        "Tokens of each document packed into a sequence; attention stays within a document.", default=None, least=1
    )


@dataclass(frozen=True, kw_only=True)
class SingleGpuOptions(Options):
    """Options of a model on a single GPU."""

    panel = MODEL_PANEL

    cache_length: int | None = option(
        "Decode --sequence-length tokens (default: 1) behind a cache of this many tokens.",
        default=None,
        least=1,
    )
    layout: MemoryLayout = option(
        "Memory layout of images: NCHW (contiguous) or NHWC (channels-last).", default="contiguous"
    )


@dataclass(frozen=True, kw_only=True)
class HostOptions(Options):
    """Host software of a step that is not recorded."""

    panel = MACHINE_PANEL

    overheads: Path | None = option(
        "Host overheads: a known host, a table, or profiles of the very job (a file, pattern or archive); "
        "default: a host of the GPU's generation.",
        default=None,
        default_text="hosts of the GPU's generation",
    )


@dataclass(frozen=True, kw_only=True)
class GpuOptions(Options):
    """GPU of a step."""

    panel = MACHINE_PANEL

    gpu: str = option(GPU_HELP, read=os.fspath)


def _spread(value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"--speed-spread {value:g}: must be from 0 to 1")
    return value


@dataclass(frozen=True, kw_only=True)
class NodesOptions(Options):
    """Number of nodes, and the network between them."""

    panel = MACHINE_PANEL

    nodes: int | None = option("Nodes of the job.", default=None, least=1, harmless=1)
    network: str | None = option(
        "Network between nodes, NAME:N for N cards per node; default: the cluster's own.", default=None
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(NodesOptions, GpuOptions):
    """GPUs of a job of several ranks, and their variation."""

    panel = MACHINE_PANEL

    gpus: int | None = option(GPUS_HELP, default=None, least=1, harmless=1)
    speed_spread: float | None = option(
        "Standard deviation of the GPUs' speeds, such as 0.02; 0: equal GPUs. Default: a band fitted to "
        "published training steps.",
        default=None,
        read=_spread,
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
class StepOptions(SingleGpuOptions, StackOptions, LinearAttentionOptions, SelectionOptions, CaptureOptions):
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


StepFunction = str | Callable[..., Any]


def script_name(script: StepFunction) -> str:
    """Return ``FILE.py:FUNCTION`` of either form: for messages, and as the name of the workload."""
    if isinstance(script, str):
        return script
    function = inspect.unwrap(getattr(script, "func", script))  # of functools.partial, of decorators
    code = getattr(function, "__code__", None)
    return f"{code.co_filename if code else '<python>'}:{getattr(function, '__name__', type(function).__name__)}"


def script_folder(script: StepFunction) -> Path | None:
    """Return the folder whose modules belong to the script; None for a function, which is imported already."""
    return Path(script.rpartition(":")[0]).resolve().parent if isinstance(script, str) else None
