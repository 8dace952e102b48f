"""Decisions of CUDA made above autograd: dropout, attention, autocast, norms, recurrent layers, devices; frames of the
outer calls.

Without a GPU PyTorch decides otherwise. Autocast is applied by device, and the meta device has none; its lists are
those of ``aten/src/ATen/autocast_mode.h`` (``AT_FORALL_LOWER_PRECISION_FP`` and ``AT_FORALL_FP32``), for the functions
that a script can call. ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` are decomposed into the operators of every time step:
here they are recorded as on CUDA, one cuDNN call forward (``aten::_cudnn_rnn``) and one backward, with the arguments of
the profiler's traces; cells, which run one time step, as two products and one fused kernel. ``aten::_fused_rms_norm``
has no derivative of its own and is decomposed into ten operators: on CUDA it is one kernel forward, one operator
backward (PyTorch 2.9 and later).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from costmodel.base.errors import ModelError
from e2e.capture.cuda_packages.kernels import attend
from e2e.capture.environment import is_device_number
from e2e.capture.known_values import know, known
from e2e.capture.recorder import Recorder
from e2e.step.options import AttentionForm

LOWER_PRECISION = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
    + ("addmm", "addmv", "addr", "matmul", "__matmul__", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm")
    + (
        "chain_matmul",
        "prelu",
        "scaled_dot_product_attention",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    )
)
FULL_PRECISION = frozenset(
    ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh")
    + ("tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "nuclear_norm", "cosine_similarity")
    + ("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div")
    + ("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss")
    + ("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits")
    + ("dist", "pdist", "cdist", "renorm", "logsumexp", "softmax", "log_softmax", "cumprod", "cumsum", "prod", "sum")
    + ("cross_entropy_loss", "norm", "rms_norm")
)
WIDEST = frozenset(
    ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sample", "index_put", "tensordot")
    + ("scatter_add", "cat", "stack")
)


# Weights that the outermost autocast region has cast, which it does once (``cached_cast`` in autocast_mode.cpp), by id.
_WEIGHTS: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Context in which the cast weights of an autocast region are forgotten at its end."""
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        _WEIGHTS.clear()
        clear()

    try:
        with patch.object(torch, "clear_autocast_cache", cleared):
            yield
    finally:
        _WEIGHTS.clear()


def cast_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments of the function ``name`` as autocast would; the casts are recorded like any operator."""
    if name in LOWER_PRECISION:
        target = torch.get_autocast_dtype("cuda")
    elif name in FULL_PRECISION:
        target = torch.float32
    elif name in WIDEST:
        target = _widest([*args, *kwargs.values()])
    else:
        return tuple(args), dict(kwargs)
    with torch.autocast("cuda", enabled=False):
        return tuple(_cast(arg, target) for arg in args), {key: _cast(arg, target) for key, arg in kwargs.items()}


def _cast(value: Any, target: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype is not torch.float64 and value.device.type == "meta"
        if not eligible or value.dtype is target:
            return value
        if not (value.requires_grad and value.is_leaf and value.dtype is torch.float32 and torch.is_grad_enabled()):
            return value.to(target)
        if id(value) not in _WEIGHTS:
            _WEIGHTS[id(value)] = value, value.to(target)
        return _WEIGHTS[id(value)][1]
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_cast(item, target) for item in value)
    return value


def _widest(values: Sequence[Any]) -> torch.dtype:
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
    found = {value.dtype for value in flat if isinstance(value, torch.Tensor)}
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cuda")


# Name of the function -> cuDNN's number of the mode.
RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_LSTM = RNN_MODES["lstm"]


def recurrent(recorder: Recorder, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the results of ``torch.lstm`` and similar. Projections run operator by operator."""
    sizes: list[int] = []
    if kwargs or len(args) != 9:
        return func(*args, **kwargs)
    if isinstance(args[3], (tuple, list)):  # sequences that are packed: their number at each time step
        data, counts, states, weights, has_bias, layers, dropout, train, bidirectional = args
        if counts.device.type != "cpu":
            return func(*args, **kwargs)
        with recorder.paused():
            batch_first, sizes = False, counts.tolist()
    else:
        data, states, weights, has_bias, layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = states if isinstance(states, (tuple, list)) else (states, None)
    per_layer = (4 if has_bias else 2) * (2 if bidirectional else 1)
    if data.device.type != "meta" or data.dim() != (2 if sizes else 3) or len(weights) != per_layer * layers:
        return func(*args, **kwargs)
    numbers = (RNN_MODES[name], hidden.shape[-1], 0, layers, batch_first, dropout, train, bidirectional, sizes)
    output, last, last_cell = CudnnRnn.apply(recorder, numbers, data, hidden, cell, *weights)
    return (output, last, last_cell) if RNN_MODES[name] == _LSTM else (output, last)


class CudnnRnn(torch.autograd.Function):
    """cuDNN call on ``data`` (time, batch, width), or batch first, or (rows, width) of packed sequences; ``hidden`` and
    ``cell`` (layers x directions, batch, hidden).
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        numbers: tuple[Any, ...],
        data: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> Any:
        ctx.recorder, ctx.numbers = recorder, numbers
        ctx.save_for_backward(data, hidden, *weights)
        _, size, _, layers, _, _, _, bidirectional, _ = numbers
        with recorder.paused():
            output = data.new_empty((*data.shape[:-1], size * (2 if bidirectional else 1)))
            last = torch.empty_like(hidden)
            last_cell = data.new_empty(0) if cell is None else torch.empty_like(cell)
        inputs = (data, list(weights), len(weights) // layers, None, hidden, cell, *numbers, None)
        recorder.record_call("aten::_cudnn_rnn", inputs, (output, last, last_cell), {})
        return output, last, last_cell

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        data, hidden, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with ctx.recorder.paused():
            of_data = torch.empty_like(data) if needs[2] else None
            of_hidden = torch.empty_like(hidden) if needs[3] else None
            of_cell = torch.empty_like(hidden) if needs[4] else None
            of_weights = [torch.empty_like(weight) for weight in weights]
        per_layer = len(weights) // ctx.numbers[3]
        states = (hidden, of_cell, gradients[0], *gradients)
        inputs = (data, weights, per_layer, None, *states, *ctx.numbers, None, None)
        outputs = (of_data, of_hidden, of_cell, of_weights)
        ctx.recorder.record_call("aten::_cudnn_rnn_backward", inputs, outputs, {})
        return (None, None, of_data, of_hidden, of_cell, *of_weights)


CudnnRnn._backward_cls.__name__ = "CudnnRnnBackward0"  # type: ignore[attr-defined] # PyTorch's node, and its host time


# Name of the cell's function -> its fused kernel, gates, and what it keeps for the backward pass, in sizes of a state.
# An LSTM has a second state; a GRU's gates of the state have gradients and a bias of their own.
_CELLS = {"lstm_cell": ("aten::_thnn_fused_lstm_cell", 4, 4), "gru_cell": ("aten::_thnn_fused_gru_cell", 3, 5)}


def recurrent_cell(name: str, func: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    """Compute ``torch.lstm_cell`` or ``torch.gru_cell`` as CUDA does (``LSTMCell`` and ``GRUCell`` in RNN.cpp)."""
    if kwargs or len(args) != 6 or args[0].device.type != "meta":
        return func(*args, **kwargs)
    data, state, of_data, of_state, *biases = args
    hidden, cell = state if isinstance(state, (tuple, list)) else (state, None)
    gates = torch.matmul(data, of_data.t()), torch.matmul(hidden, of_state.t())
    found = FusedCell.apply(recorder, name, *gates, hidden if cell is None else cell, *biases)
    return found[0] if cell is None else found[:2]


class FusedCell(torch.autograd.Function):
    """Fused kernel of a cell on the gates of data and state (batch, gates x hidden), a state and biases."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, name: str, *inputs: torch.Tensor | None) -> Any:
        operator, _, kept = _CELLS[name]
        ctx.recorder, ctx.cell, ctx.biased = recorder, name, inputs[3] is not None
        state = inputs[2]
        assert state is not None
        with recorder.paused():
            results = [torch.empty_like(state) for _ in range(2 if name == "lstm_cell" else 1)]
            workspace = state.new_empty((*state.shape[:-1], kept * state.shape[-1]))
        recorder.record_call(operator, inputs, (*results, workspace), {})
        ctx.save_for_backward(state, workspace, *results[1:])
        ctx.mark_non_differentiable(workspace)
        return (*results, workspace)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        state, workspace, *second = ctx.saved_tensors
        operator, gates, _ = _CELLS[ctx.cell]
        shape = (*state.shape[:-1], gates * state.shape[-1])
        with ctx.recorder.paused():
            of_gates = [state.new_empty(shape) for _ in range(1 if second else 2)]
            of_state = torch.empty_like(state)
        inputs = (*gradients[: 1 + len(second)], *((state, *second) if second else ()), workspace, ctx.biased)
        ctx.recorder.record_call(f"{operator}_backward", inputs, (*of_gates, of_state), {})
        of_biases = [each.sum(0) if ctx.biased else None for each in of_gates]
        return None, None, of_gates[0], of_gates[-1], of_state, of_biases[0], of_biases[-1]


FusedCell._backward_cls.__name__ = "ThnnFusedCellBackward0"  # type: ignore[attr-defined]


_MEAN, _SUM = 1, 2  # PyTorch's numbers of reductions


def ctc_loss(
    func: Any,
    recorder: Recorder,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute ``torch.ctc_loss`` on (time, batch, classes) by PyTorch's own kernel; lengths may be on the host."""
    if log_probs.device.type != "meta":
        return func(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    alone = log_probs.dim() == 2
    batch = log_probs.unsqueeze(1) if alone else log_probs
    longest = targets.shape[-1] if targets.dim() == 2 or alone else -(-targets.numel() // batch.shape[1])
    losses = CtcLoss.apply(recorder, batch, longest)
    if zero_infinity:
        losses = torch.where(losses == math.inf, 0.0, losses)
    if reduction == _MEAN:
        return (losses / torch.ones_like(losses)).mean()
    return losses.sum() if reduction == _SUM else losses.squeeze(0) if alone else losses


class CtcLoss(torch.autograd.Function):
    """CTC losses (batch) of log probabilities (time, batch, classes) for targets of ``longest`` labels at most."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, log_probs: torch.Tensor, longest: int) -> torch.Tensor:
        steps, batch, _ = log_probs.shape
        with recorder.paused():
            losses, alphas = log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * longest + 1))
        recorder.record_call("aten::_ctc_loss", (log_probs,), (losses, alphas), {})
        ctx.recorder = recorder
        ctx.save_for_backward(log_probs, losses, alphas)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        log_probs, losses, alphas = ctx.saved_tensors
        with ctx.recorder.paused():
            found = torch.empty_like(log_probs)
        inputs = (*gradients, log_probs, losses, alphas)
        ctx.recorder.record_call("aten::_ctc_loss_backward", inputs, (found,), {})
        return None, found, None


def is_fused_norm(data: Any, weight: Any) -> bool:
    """True under the conditions of ``rms_norm`` in layer_norm.cpp: real numbers, and a weight of the same type."""
    plain = type(data) is torch.Tensor and data.device.type == "meta" and not data.is_complex()
    return plain and (weight is None or (type(weight) in PLAIN_TENSORS and weight.dtype is data.dtype))


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class FusedRmsNorm(torch.autograd.Function):
    """Fused norm recorded as ``aten::_fused_rms_norm`` and ``aten::_fused_rms_norm_backward``."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor | None, shape: Sequence[int], eps: Any, recorder: Recorder
    ) -> torch.Tensor:
        rows = data.numel() // max(prod(shape), 1)
        with recorder.paused():
            result, factors = torch.empty_like(data), data.new_empty(rows, dtype=torch.float32)
        recorder.record_call("aten::_fused_rms_norm", (data, tuple(shape), weight, eps), (result, factors), {})
        ctx.save_for_backward(data, factors, *(() if weight is None else (weight,)))
        ctx.shape, ctx.recorder = tuple(shape), recorder
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        data, factors, *weights = ctx.saved_tensors
        weight = weights[0] if weights else None
        with ctx.recorder.paused():
            found = [torch.empty_like(tensor) for tensor in (data, *weights)]
        needed = tuple(ctx.needs_input_grad[:2])
        inputs = (gradient, data, ctx.shape, factors, weight, needed)
        ctx.recorder.record_call("aten::_fused_rms_norm_backward", inputs, tuple(found), {})
        return found[0], found[1] if weights else None, None, None, None


def rms_norm(
    recorder: Recorder,
    func: Any,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Compute ``torch.rms_norm`` as selected on CUDA."""
    if not is_fused_norm(input, weight):
        return func(input, normalized_shape, weight, eps)
    return FusedRmsNorm.apply(input, weight, normalized_shape, eps, recorder)


aten = torch.ops.aten

FLASH_HEAD_DIM = 256
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
NOT_OPERATORS = frozenset(
    (
        "__get__",
        "__set__",
        "size",
        "dim",
        "stride",
        "numel",
        "is_contiguous",
        "is_floating_point",
        "data_ptr",
        "backward",
    )
    + ("__len__", "__getitem__", "__setitem__", "requires_grad_", "retain_grad", "storage_offset", "register_hook")
)


class GpuDecisions(TorchFunctionMode):
    """Interceptor of each PyTorch function called by the script, before autograd."""

    def __init__(self, recorder: Recorder, attention: AttentionForm) -> None:
        super().__init__()
        self._recorder = recorder
        self._attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return _property(func, args, kwargs)
        if name == "__set__" and func == _SET_DATA:
            if args[0].device.type == "meta" and args[1].device.type == "cpu":
                args = args[0], args[1].to("meta")  # numbers for a parameter, which has none, from a constructor
            with self._recorder.convert.identities.moving(args[0]):
                return func(*args, **kwargs)
        if name == "data_ptr" and type(args[0]) in (torch.Tensor, torch.nn.Parameter) and args[0].is_meta:
            return _address(args[0])
        if name in NOT_OPERATORS or not all(issubclass(kind, torch.Tensor) for kind in types):
            return func(*args, **kwargs)  # of values of torch.fx too
        if name == "tolist" and args[0].device.type == "meta":
            return _listed(args[0], decides=torch.is_grad_enabled())
        func, args, kwargs = _on_meta(name, func, args, kwargs)
        if name in ("tensor", "as_tensor"):
            return _written(self._recorder, func, args, kwargs)
        if not _is_operator(name):
            return func(*args, **kwargs)
        if args and getattr(args[0], "is_nested", False):
            if name == "scaled_dot_product_attention":
                raise ModelError(
                    "scaled_dot_product_attention of nested tensors is not captured; write flex_attention with a mask "
                    "of documents, or a padded batch"
                )
            return func(*args, **kwargs)  # several tensors in one: the operators that do the work are seen below
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = cast_arguments(name, args, kwargs)
        with self._recorder.frame(f"aten::{name}", args, kwargs) as frame:
            result = self._call(name, func, args, kwargs)
            self._recorder.finish_frame(frame, result)
        return result

    def _call(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if name == "dropout":
            return dropout(func, *args, **kwargs)
        if name == "rms_norm":
            return rms_norm(self._recorder, func, *args, **kwargs)
        if name == "scaled_dot_product_attention":
            return attention(self._attention, func, *args, **kwargs)
        if name in RNN_MODES:
            return recurrent(self._recorder, name, func, args, dict(kwargs))
        if name in _CELLS:
            return recurrent_cell(name, func, self._recorder, *args, **kwargs)
        if name == "ctc_loss":
            return ctc_loss(func, self._recorder, *args, **kwargs)
        if name in ("grouped_mm", "_grouped_mm"):
            return grouped_mm(func, *args, **kwargs)
        return func(*args, **kwargs)


def dropout(func: Any, input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
    """Compute dropout; CUDA runs one fused kernel for 0 < p < 1 in training (``is_fused_kernel_acceptable`` in
    Dropout.cpp).
    """
    if train and 0 < p < 1 and input.numel() > 0 and input.device.type == "meta":
        return torch.native_dropout(input, p, True)[0]
    return func(input, p, train)


def grouped_mm(func: Any, mat_a: torch.Tensor, mat_b: torch.Tensor, **others: Any) -> torch.Tensor:
    """Compute grouped products: one kernel for bfloat16; other types run group after group on CUDA
    (``GroupedMMUtils.h``).
    """
    if mat_a.device.type != "meta" or mat_a.dtype is torch.bfloat16 or (mat_a.dim(), mat_b.dim()) != (2, 3):
        return func(mat_a, mat_b, **others)
    return GroupedProducts.apply(mat_a, mat_b)


class GroupedProducts(torch.autograd.Function):
    """Products of rows (all, k) in equal groups with one matrix of (groups, k, n) each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices)
        groups = matrices.shape[0]
        output = rows.new_empty((rows.shape[0], matrices.shape[2]))
        _products(rows.tensor_split(groups), matrices.unbind(), output.tensor_split(groups))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, matrices = ctx.saved_tensors
        groups = matrices.shape[0]
        given = gradients[0].tensor_split(groups)
        of_rows, of_matrices = torch.empty_like(rows), torch.empty_like(matrices)
        _products(given, matrices.transpose(1, 2).unbind(), of_rows.tensor_split(groups))
        _products([each.t() for each in rows.tensor_split(groups)], given, of_matrices.unbind())
        return of_rows, of_matrices


def _products(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], output: Sequence[torch.Tensor]) -> None:
    for one, other, result in zip(first, second, output, strict=True):
        torch.mm(one, other, out=result)


def attention(
    backend: AttentionForm,
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the operators that ``sdp_utils.cpp`` selects: flash for 16 bits without a mask and with values as wide as
    keys, otherwise memory-efficient, or separate products where no kernel fits and for masks that need gradients.

    The kernel on a GPU is selected when it is priced.
    """
    if backend == "math" and query.device.type == "meta":
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if backend == "eager" and dropout_p > 0 and query.device.type == "meta":
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if backend == "eager" or query.device.type == "cpu" or query.dim() != 4:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    half = query.dtype in (torch.float16, torch.bfloat16)
    alike = value.shape[-1] == query.shape[-1]
    fits = half and alike and attn_mask is None and query.shape[-1] <= FLASH_HEAD_DIM
    allowed = _allowed_backends()
    if len(allowed) < len(_BACKENDS) and type(query) in PLAIN_TENSORS:  # sharded ones have operators of their own
        suited = {"flash": fits, "cudnn": half and alike and query.shape[-1] <= CUDNN_HEAD_DIM}
        chosen = next((name for name in allowed if suited.get(name, True)), None)
        if chosen is None:
            raise RuntimeError("No available kernel. Aborting execution.")  # PyTorch's own words
        if chosen == "math":
            return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        bias = _additive(attn_mask, query)
        if chosen == "cudnn":  # PyTorch's own operator, which a checkpoint's policy tells by its name
            keeps = _needs_gradients(query, key, value)
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, keeps, dropout_p, is_causal, False, scale=scale
            )[0]
        # The operators of the other kernels stand for what PyTorch prefers on the GPU, perhaps another kernel.
        turned = (each.transpose(1, 2) for each in (query, key, value))
        kernel = {"flash": "flash2"}.get(chosen, chosen)
        return attend(*turned, kernel=kernel, causal=is_causal, dropout=dropout_p, bias=bias).transpose(1, 2)
    if fits and backend != "efficient":
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    by_cudnn = half and max(query.shape[-1], value.shape[-1]) <= CUDNN_HEAD_DIM and _prefers_cudnn()
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    learned = attn_mask is not None and attn_mask.requires_grad  # refused by `check_attn_mask_shape`
    fitting = type(query) not in PLAIN_TENSORS or _fits_efficient(
        query, value, attn_mask, grouped=grouped and not by_cudnn
    )
    if backend != "efficient" and (learned or not fitting):
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if grouped:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = _additive(attn_mask, query)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, _needs_gradients(query, key, value), dropout_p, is_causal, scale=scale
    )[0]


def _needs_gradients(*given: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)


_BACKENDS: dict[str, Callable[[], bool]] = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
}
_PRIORITIES = {1: "flash", 2: "efficient", 0: "math", 3: "cudnn"}
CUDNN_HEAD_DIM = 128
# Compute capabilities of the GPUs on which PyTorch prefers cuDNN's attention.
_CUDNN_FIRST = (9, 10)


def _allowed_backends() -> list[str]:
    """Return the kernels that the program allows (``sdpa_kernel``, ``enable_flash_sdp`` ...), the preferred one
    first: in the program's order if it sets one (``sdpa_kernel(..., set_priority=True)``).
    """
    ordered = [_PRIORITIES[each] for each in torch._C._get_sdp_priority_order() if each in _PRIORITIES]
    if ordered == list(_BACKENDS) and _prefers_cudnn():
        ordered.insert(0, ordered.pop())
    return [name for name in ordered if _BACKENDS[name]()]


def _prefers_cudnn() -> bool:
    return torch.cuda.get_device_capability()[0] in _CUDNN_FIRST


def _fits_efficient(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool) -> bool:
    """True if ``can_use_mem_efficient_attention`` accepts the operands: widths of whole vectors, rows without gaps, as
    many keys' heads as queries' (up to version 2.13).
    """
    vector = 16 // query.element_size()
    whole = query.shape[-1] % vector == 0 and value.shape[-1] % vector == 0
    return whole and not grouped and (mask is None or mask.stride(-1) == 1)


def math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Call the operators of ``_scaled_dot_product_attention_math`` with CUDA's dropout, which C++ would decompose."""
    given = query.dtype
    if given in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    query = query * factor
    if is_causal:
        mask = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device).tril()
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(torch.where(mask, 0.0, float("-inf")).to(query.dtype) if mask.dtype is torch.bool else mask)
    weights = aten._safe_softmax(scores, -1)
    return torch.matmul(dropout(torch.dropout, weights, dropout_p), value).to(given)


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Convert boolean masks to additive ones, expanded to all heads (``convert_boolean_attn_mask``)."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    return mask.expand(query.shape[0], query.shape[1], mask.shape[-2], mask.shape[-1])


def _listed(tensor: torch.Tensor, decides: bool) -> Any:
    """Return ``tolist()``, for which the host waits for a copy.

    Unknown integers, which may be sizes, raise ``ModelError``, unless no gradients are kept (``decides``): predictions
    of an evaluation. Other unknown numbers are zeros, like those of ``.cpu()``.
    """
    if known(tensor) is None and not tensor.is_floating_point() and decides:
        if tensor.dim() == 0:
            return tensor.item()
        raise ModelError(
            "tolist(): a capture has no values; where sizes depend on data, give typical ones; values that are only "
            "shown may be zeros: .cpu().tolist()"
        )
    return tensor.cpu().tolist()


def _written(recorder: Recorder, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``torch.tensor`` on numbers of the script. It makes a tensor of the host, number by number, which is copied
    to the GPU while the host waits. Single numbers on the GPU among them are read.
    """
    data = _numbers(args[0] if args else kwargs.get("data"))
    others = {key: value for key, value in kwargs.items() if key != "data"}
    place = others.pop("device", None)
    if place is None and isinstance(data, torch.Tensor) and import_module("torch.utils._device").CURRENT_DEVICE is None:
        place = data.device  # where no default device is set, a tensor stays where it is
    device = torch.device(place or torch.get_default_device())
    if device.type != "meta" or isinstance(data, torch.Tensor):
        result = func(data, *args[1:], device=device, **others)
        if isinstance(data, (list, tuple)):
            recorder.note_numbers(result.numel())
        return result
    trained = others.pop("requires_grad", False)
    constant = recorder.regions is not None and recorder.regions.inside  # of compiled code
    with recorder.paused() if constant else nullcontext():
        written = func(data, *args[1:], device="cpu", **others)
        if isinstance(data, (list, tuple)):
            recorder.note_numbers(written.numel())
        result = written.to(device)
    know(result, written)
    return result.requires_grad_() if trained else result


def _numbers(data: Any) -> Any:
    """Return ``data`` with numbers in place of tensors in its lists, for each of which the host waits."""
    if not isinstance(data, (list, tuple)):
        return data
    found = [each.item() if isinstance(each, torch.Tensor) and each.dim() == 0 else _numbers(each) for each in data]
    return found if any(one is not other for one, other in zip(found, data, strict=True)) else data


@cache
def _is_operator(name: str) -> bool:
    """True if ``name`` is one operator, not a Python function around several."""
    return not name.startswith("__") and hasattr(aten, name)


# Location attributes of meta tensors: the values on the GPU of their rank.
_PLACE: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("cuda", torch.cuda.current_device()),
    "is_cuda": lambda: True,
    "is_meta": lambda: False,
}


def _address(tensor: torch.Tensor) -> int:
    """Return where ``tensor`` would be: another place for each storage, aligned as on a GPU, by which programs tell
    parameters apart; 0 without contents.
    """
    storage = tensor.untyped_storage()
    return (storage._cdata << 9) + tensor.storage_offset() * tensor.element_size() if storage.size() else 0


def _property(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an attribute of a tensor, with location attributes as on the GPU."""
    place = _PLACE.get(getattr(func.__self__, "__name__", ""))
    return place() if place is not None and args[0].is_meta else func(*args, **kwargs)


def _on_meta(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Replace ``cuda`` as a device by the meta device; memory is not pinned, as there is none."""
    kwargs.pop("pin_memory", None)
    if name == "cuda":
        return torch.Tensor.to, (args[0], torch.device("meta")), {}
    if "device" in kwargs and _is_cuda(kwargs["device"]):
        kwargs = {**kwargs, "device": torch.device("meta")}
    if name == "to" and len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], torch.device("meta"), *args[2:])
    return func, args, kwargs


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if is_device_number(device):
        return True
    return isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))
