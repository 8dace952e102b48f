"""Conversion of a Hugging Face transformer on the meta device to the part of one tensor-parallel rank.

Products before the heads and the MLP's inner width are split by columns, products after them by rows, those of experts
by their inner width, embedding and head by vocabulary (Megatron-LM, arXiv 1909.08053). Communication becomes the
operators of :mod:`e2e.parallelism.communication`. Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.parallelism.communication import (
    CopyToRanks,
    LossOverRanks,
    ParallelCrossEntropy,
    ReduceFromRanks,
    Regathered,
    gather_sequence,
    scatter_sequence,
)
from e2e.step.memory import EXPERT_DIMENSIONS

# Products inside a layer, by their names in GPT-2; Llama and related models; DeepSeek; OPT; BERT.
COLUMN = (
    ("attn.c_attn", "mlp.c_fc", "fc1")
    + ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj")
    + ("self_attn.packed_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
    + ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")
)
ROW = ("attn.c_proj", "mlp.c_proj", "self_attn.o_proj", "mlp.down_proj", "self_attn.out_proj", "fc2") + (
    "attention.output.dense",
    "output.dense",
)
# MLP of experts: weights of all experts in one tensor, and shared experts. The sum over ranks comes after both.
MIXTURE, EXPERTS = "mlp", "mlp.experts"
SHARED = ("mlp.shared_expert", "mlp.shared_experts")
SHARED_COLUMN = tuple(f"{shared}.{name}" for shared in SHARED for name in ("gate_proj", "up_proj", "gate_up_proj"))
SHARED_ROW = tuple(f"{shared}.down_proj" for shared in SHARED)
# Products that every rank computes in full, since they are small.
WHOLE = ("mlp.gate", "mlp.router", "mlp.shared_expert_gate", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
# Modules whose input is gathered or copied once for all products inside, and the attention modules among them.
BLOCKS = ("attn", "self_attn", "attention.self", "mlp", "fc1", "intermediate")
ATTENTION = ("attn", "self_attn", "attention.self")
# Attributes that count heads or columns of the whole layer.
SPLIT_ATTRIBUTES = ("num_heads", "num_key_value_heads", "split_size", "embed_dim") + (
    "num_attention_heads",
    "all_head_size",
)
VOCABULARY_MULTIPLE = 128


def shard(
    model: Any,
    layers: nn.ModuleList,
    tp: int,
    sequence_parallel: bool,
    source: str,
    whole_experts: bool = False,
    loss_parallel: bool = False,
) -> None:
    """Split ``model`` over ``tp`` ranks in place; raise ``InputError`` if not possible.

    ``loss_parallel``: the model's loss is replaced by DTensor's, with its own operators. ``whole_experts``: experts of
    a mixture, and its router, stay whole and see only the rank's own part of the sequence; shared experts gather their
    input themselves (``SharedExpertMLP`` of Megatron-Core).
    """
    if whole_experts and not any(name == EXPERTS for layer in layers for name, _ in layer.named_modules()):
        kind = model.config.model_type
        raise InputError(f"{source}: etp=1: the layers of model type {kind!r} have no experts; leave etp out")
    _check(model.config, layers, tp, source, whole_experts)
    for layer in layers:
        _shard_layer(layer, tp, sequence_parallel, whole_experts)
    _shard_vocabulary(model, tp, sequence_parallel, loss_parallel)
    if sequence_parallel:
        _split_between(layers, tp)


def _check(config: Any, layers: nn.ModuleList, tp: int, source: str, whole_experts: bool) -> None:
    kinds = (layers[0], layers[-1])
    known = {*COLUMN, *ROW, *SHARED_COLUMN, *SHARED_ROW, *WHOLE}
    modules = [pair for layer in kinds for pair in layer.named_modules()]
    names = {name for name, _ in modules}
    parameters = [pair for layer in kinds for pair in layer.named_parameters()]
    products = {name for name, module in modules if type(module).__name__ in ("Linear", "Conv1D")}
    stacked = {name for name, parameter in parameters if parameter.dim() >= EXPERT_DIMENSIONS}
    whole = (products - known) | {name for name in stacked if not name.startswith(EXPERTS)}
    if not names & set(COLUMN) or not names & {*ROW, EXPERTS} or whole:
        which = f" ({', '.join(sorted(whole))})" if whole else ""
        kind = config.model_type
        raise InputError(f"{source}: tp={tp}: the layers of model type {kind!r}{which} cannot be split; use tp=1")
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    for count, what in ((heads, "attention heads"), (keys, "key-value heads")):
        if count % tp:
            raise InputError(f"{source}: tp={tp} does not divide {count} {what}; choose a tp that does")
    for layer in kinds:
        _check_widths(layer, tp, source, whole_experts)


def _check_widths(layer: nn.Module, tp: int, source: str, whole_experts: bool) -> None:
    """Raise ``InputError`` if a split dimension does not divide evenly."""
    for name, parameter in layer.named_parameters():
        module = name.rpartition(".")[0]
        if module in (*COLUMN, *SHARED_COLUMN, *ROW, *SHARED_ROW) and parameter.dim() > 1:
            dimension = _split_dimension(layer.get_submodule(module), module in COLUMN + SHARED_COLUMN)
        elif module == EXPERTS and parameter.dim() == EXPERT_DIMENSIONS and not whole_experts:
            dimension = _inner_dimension(layer.get_submodule(module), name)
        else:
            continue
        if parameter.shape[dimension] % tp:
            shape = " x ".join(map(str, parameter.shape))
            raise InputError(f"{source}: tp={tp} does not divide {name}, {shape}; choose a tp that does")


def _shard_layer(layer: nn.Module, tp: int, sequence_parallel: bool, whole_experts: bool) -> None:
    modules = dict(layer.named_modules())
    whole = whole_experts and EXPERTS in modules
    # In a mixture of whole experts only the shared experts, if any, communicate.
    blocks = {*BLOCKS, *SHARED} - {MIXTURE} if whole else set(BLOCKS)
    ends = {*ROW, *SHARED} if whole else {*ROW, MIXTURE} if EXPERTS in modules else set(ROW)
    for name, module in modules.items():
        if name in COLUMN + SHARED_COLUMN and hasattr(module, "weight"):  # not a part of a packed product
            _shrink(module, tp, columns=True)
        if name in ROW + SHARED_ROW:
            _shrink(module, tp, columns=False)
        if name == EXPERTS and not whole:
            _shrink_experts(module, tp)
        if name in ends:
            module.register_forward_hook(_behind(tp, sequence_parallel))
        if name in ATTENTION:
            for attribute in SPLIT_ATTRIBUTES:
                if isinstance(getattr(module, attribute, None), int):
                    setattr(module, attribute, getattr(module, attribute) // tp)
            if isinstance(getattr(module, "sinks", None), nn.Parameter):  # one number per head
                module.sinks = _smaller(module.sinks, tp, 0)  # type: ignore[arg-type]
        if name in blocks and sequence_parallel:
            _gather_in_front(module, tp)
        elif name in blocks:
            module.register_forward_pre_hook(_with_input(CopyToRanks.apply), with_kwargs=True)


def _shrink(module: Any, tp: int, columns: bool) -> None:
    """Split weights (out, in) of Linear or (in, out) of GPT-2's Conv1D. The bias of a row-parallel product stays
    whole.
    """
    module.weight = _smaller(module.weight, tp, _split_dimension(module, columns))
    if columns and module.bias is not None:
        module.bias = _smaller(module.bias, tp, 0)
    if columns and _transposed(module):
        module.nf = module.nf // tp


def _shrink_experts(experts: Any, tp: int) -> None:
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, _smaller(getattr(experts, name), tp, _inner_dimension(experts, name)))
    if getattr(experts, "gate_up_proj_bias", None) is not None:
        experts.gate_up_proj_bias = _smaller(experts.gate_up_proj_bias, tp, 1)


def _inner_dimension(experts: Any, name: str) -> int:
    """Return the inner dimension of weights (experts, out, in), or (experts, in, out) if the module is transposed; it
    is the output of gate and up.
    """
    inner = 2 if experts.is_transposed else 1
    return 3 - inner if name.endswith("down_proj") else inner


def _split_dimension(module: nn.Module, columns: bool) -> int:
    return 1 if columns == _transposed(module) else 0


def _transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _smaller(parameter: torch.Tensor, tp: int, dimension: int) -> nn.Parameter:
    shape = list(parameter.shape)
    shape[dimension] //= tp
    return nn.Parameter(parameter.new_empty(shape))


def _sequence(given: torch.Tensor) -> int:
    """Return the dimension of the tokens: activations are (batch, sequence, hidden) or, in OPT's MLP, (tokens,
    hidden).
    """
    return given.dim() - 2


def _gather_in_front(module: nn.Module, tp: int) -> None:
    """Gather the input of ``module``, and again in the backward pass."""
    contexts: list[Any] = []

    def gather(given: torch.Tensor) -> torch.Tensor:
        sequence = _sequence(given)
        whole: torch.Tensor = gather_sequence(given, tp, sequence)
        gathered = Regathered(lambda part: torch.ops.parallel.all_gather_again(part, tp, sequence))
        gathered.know(whole, given)
        contexts.append((gathered.hooks(), whole))
        contexts[-1][0].__enter__()
        return whole

    def leave(*_: Any) -> None:
        contexts.pop()[0].__exit__(None, None, None)

    module.register_forward_pre_hook(_with_input(gather), with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def _with_input(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def _behind(tp: int, sequence_parallel: bool) -> Callable[..., Any]:
    def change(output: torch.Tensor) -> torch.Tensor:
        if sequence_parallel:
            return scatter_sequence(output, tp, _sequence(output))
        return ReduceFromRanks.apply(output)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook


def _shard_vocabulary(model: Any, tp: int, sequence_parallel: bool, loss_parallel: bool) -> None:
    """Split the vocabulary, padded to divide evenly; the loss sees this rank's classes.

    With sequence parallelism the scatter before the first layer sums the partial embeddings, and the gradients of the
    head's input are summed where the gradients of the gather after the last layer are scattered.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    multiple = VOCABULARY_MULTIPLE * tp
    rows = -(-embedding.num_embeddings // multiple) * multiple // tp
    tied = head is not None and head.weight is embedding.weight
    embedding.weight = nn.Parameter(embedding.weight.new_empty((rows, embedding.weight.shape[1])))
    if not sequence_parallel:
        embedding.register_forward_hook(lambda module, args, output: ReduceFromRanks.apply(output))
    if head is not None:
        shape = (rows, head.weight.shape[1])
        head.weight = embedding.weight if tied else nn.Parameter(head.weight.new_empty(shape))
        if getattr(head, "bias", None) is not None:
            head.bias = nn.Parameter(head.bias.new_empty((rows,)))
        if not sequence_parallel:
            head.register_forward_pre_hook(lambda module, args: (CopyToRanks.apply(args[0]),))
        if loss_parallel and hasattr(model, "loss_function"):
            model.loss_function = _loss_over_ranks
        else:
            head.register_forward_hook(_before_loss)
    model.config.vocab_size = rows
    if hasattr(model, "vocab_size"):  # some families read the attribute of the model
        model.vocab_size = rows


def _loss_over_ranks(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> Any:
    return ParallelCrossEntropy.apply(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


def _before_loss(head: nn.Module, args: Any, scores: torch.Tensor) -> torch.Tensor:
    """Apply the distributed loss to the scores; in inference they stay split by vocabulary."""
    return LossOverRanks.apply(scores) if head.training else scores  # type: ignore[no-any-return]


def _split_between(layers: nn.ModuleList, tp: int) -> None:
    """Scatter activations before the first layer and gather them after the last."""

    def scatter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (scatter_sequence(args[0], tp, 1), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": scatter_sequence(kwargs["hidden_states"], tp, 1)}

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (gather_sequence(output[0], tp, 1), *output[1:])
        return gather_sequence(output, tp, 1)

    layers[0].register_forward_pre_hook(scatter, with_kwargs=True)
    layers[-1].register_forward_hook(gather)
