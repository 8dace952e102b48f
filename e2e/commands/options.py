"""Options of the command line, each with its type and help once, for ``predict``, ``sweep`` and ``shard``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

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
from e2e.step.precision import Precision


def _number_choice(allowed: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``typer.Option`` for one of ``allowed``: the error of what other tools have says what is asked
    instead.
    """

    def read(value: str) -> str:
        if value not in allowed:
            offered = f"choose one of {', '.join(allowed)}"
            raise typer.BadParameter(f"{value}: {instead_of(value) or offered}")
        return value

    return {"parser": read, "metavar": f"[{'|'.join(allowed)}]"}


# What is computed.
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Built-in model, such as gpt2-large, resnet50 or timm/NAME (where timm is installed); the error of an "
        "unknown name lists them, and so does docs/models.md."
    ),
]
ModelConfigOption = Annotated[Path | None, typer.Option(help="Hugging Face configuration file.")]
ScriptOption = Annotated[str | None, typer.Option(help="FILE.py:FUNCTION that returns (module, step).")]
TracesOption = Annotated[
    list[str] | None,
    typer.Option(help="PyTorch execution traces (.json, .gz, .tar.gz), one per rank: several files or patterns."),
]
KinetoOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Profiles of the same run as --trace, one per rank: several files or patterns. Their host times and "
        "kernels are used."
    ),
]
TablesOption = Annotated[Path | None, typer.Option(help="tables.yaml of --model dlrm.")]
BatchSizeOption = Annotated[
    int | None,
    typer.Option(min=1, help="Samples per GPU and micro-batch; default: 1, of --script and --sharding their own."),
]
SequenceLengthOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens; default: the model's maximum, 4096 at most; of --script its own.")
]
DocumentLengthOption = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of each document of which sequences are packed; it sees itself alone."),
]
CacheLengthOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of each sequence that lie in a cache: the step decodes those of --sequence-length (1)."
    ),
]
StepModeOption = Annotated[
    Mode,
    typer.Option(help="What one step does; inference is one forward pass over all tokens (see --cache-length)."),
]
# How it is computed.
RecipeOption = Annotated[
    str | None,
    typer.Option(
        help="How it is trained, in one word: plain, hf-trainer, torchtitan, megatron, llm-foundry, deepspeed, "
        "pure-bf16 (vllm: inference). Says what is not asked for of --stack, --dtype, --attention and of --parallel; "
        "default: plain."
    ),
]
NumberTypeOption = Annotated[
    Dtype | None,
    typer.Option(
        help="Number type of the model; default: bfloat16 (float16 where the GPU has no such units) with FP32 master "
        "weights and states, of others than transformers float32. Autocast over FP32 weights (AMP): by a --script.",
        **_number_choice(get_args(Dtype)),
    ),
]
AttentionOption = Annotated[
    AttentionForm | None,
    typer.Option(
        help="flash: the kernel that PyTorch takes on the GPU; or one by name; eager, math: products and softmax "
        "apart. Default: flash where the model has it, or what --recipe says."
    ),
]
StackOption = Annotated[
    str | None,
    typer.Option(
        help="Whose kernels a transformer has: huggingface, torchtitan, megatron, megatron-lm, te, liger, llm-foundry; "
        "default: what --recipe says."
    ),
]
AdaptersOption = Annotated[
    int | None, typer.Option("--lora", min=1, help="Rank of adapters of queries, keys and values; weights are frozen.")
]
LayoutOption = Annotated[
    MemoryLayout, typer.Option(help="How the images of a built-in model lie in memory: NCHW or NHWC.")
]
MixtureOption = Annotated[
    MixtureForm,
    typer.Option(
        "--moe", help="Experts: fused permutation and grouped products (grouped), or as the library writes them."
    ),
]
RoutingOption = Annotated[
    str, typer.Option(help="How experts share tokens: balanced, power-law=1.2, capacity=1.25, or both with a comma.")
]
PrecisionOption = Annotated[
    Precision | None,
    typer.Option(
        help="Linear layers trained in 8 bits by this recipe; --dtype bfloat16 is the rest.",
        **_number_choice(get_args(Precision)),
    ),
]
LinearAttentionOption = Annotated[
    LinearAttentionForm | None,
    typer.Option(
        help="Mamba and gated delta rules of Transformers: by the fused kernels of mamba_ssm, causal_conv1d and "
        "flash-linear-attention, or in single operators; default: fused where these are installed."
    ),
]
OptimizerOption = Annotated[
    OptimizerForm | None,
    typer.Option(
        help="How parameters are updated where the model leaves it open: tensor lists operation by operation (foreach) "
        "or in one kernel (fused); default: foreach, as PyTorch does, or what --stack does."
    ),
]
CudaGraphOption = Annotated[bool, typer.Option(help="The step is replayed as one CUDA graph.")]
CompiledOption = Annotated[bool, typer.Option("--compile", help="Forward and backward by torch.compile.")]
OverheadsOption = Annotated[
    Path | None,
    typer.Option(
        help="Table of host overheads, a known host, or profiles of the very job (a file, pattern or archive); "
        "default: by the GPU's generation."
    ),
]
ParallelOption = Annotated[
    str | None,
    typer.Option(
        help="How a built-in model is spread: dp=8, fsdp=8, tp=4,pp=2,micro-batches=8, cp=4,zero=3, dp=8,ep=8 ..."
    ),
]
ShardingOption = Annotated[Path | None, typer.Option(help="plan.json that places the tables of --config.")]
RanksOption = Annotated[
    str | None, typer.Option(help="Ranks of --script to capture, such as 0,7, where they differ unseen.")
]
# On what.
GpuOption = Annotated[
    str | None,
    typer.Option(
        help="Machine or cluster: a name (`python -m costmodel machines`) or a YAML file. Of a recorded run: the GPU "
        "it ran on, if its profile does not tell."
    ),
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="GPUs of the whole job; a transformer of --model or --model-config is spread as --parallel says, "
        "without it in the way that is predicted to be fastest.",
    ),
]
NodesOption = Annotated[int | None, typer.Option(min=1, help="Nodes over which they are spread.")]
NetworkOption = Annotated[
    str | None, typer.Option(help="Network between nodes, NAME:N for N cards per node; default: the cluster's own.")
]
RetargetOption = Annotated[str | None, typer.Option(help="GPU (or cluster) to move a recorded run to.")]
VariationOption = Annotated[
    str | None, typer.Option(help="How ranks vary: spread=0.02,jitter=0.05,seed=1,start=RANK:MS.")
]
# Beside the times.
PriceOption = Annotated[
    str | None,
    typer.Option(help="Dollars per GPU and hour, or a YAML file of prices by GPU: adds what a step costs."),
]
AdviceOption = Annotated[
    bool,
    typer.Option(
        "--advice", help="Predict other settings too: what to change, and the largest batch that fits (takes longer)."
    ),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option(
        help="What if: batch=N, kernels:FAMILY=Kx, host=Kx, host=FILE, bucket-mb=N, stream:REGEX=N, batch-embeddings, "
        "fuse:REGEX; with + several at once. Repeatable: each alone, and all together."
    ),
]
# Where the answer goes.
TimelineOption = Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace (.json or .json.gz).")]
ReportOption = Annotated[Path | None, typer.Option(help="Write a self-contained HTML report.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
