"""Decisions of CUDA made above autograd: dropout, attention, autocast, devices; frames of the outer calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from costmodel.base.errors import ModelError
from e2e.capture.autocast import cast_arguments
from e2e.capture.environment import is_device_number
from e2e.capture.known_values import LIMIT, know, known
from e2e.capture.recorder import Recorder
from e2e.capture.recurrent import MODES, recurrent
from e2e.capture.rms_norm import rms_norm
from e2e.step.choices import AttentionForm

aten = torch.ops.aten

FLASH_HEAD_DIM = 256
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
        if name in NOT_OPERATORS:
            return func(*args, **kwargs)
        if name == "tolist" and args[0].device.type == "meta":
            return _listed(args[0])
        func, args, kwargs = _on_meta(name, func, args, kwargs)
        if name in ("tensor", "as_tensor"):
            return _written(func, args, kwargs)
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
        if name in MODES:
            return recurrent(self._recorder, name, func, args, dict(kwargs))
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
    keys, otherwise memory-efficient.

    The kernel on a GPU is selected when it is priced.
    """
    if backend == "math" and query.device.type == "meta":
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if backend == "eager" and dropout_p > 0 and query.device.type == "meta":
        return math_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if backend == "eager" or query.device.type != "meta" or query.dim() != 4:
        return func(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    half = query.dtype in (torch.float16, torch.bfloat16)
    alike = value.shape[-1] == query.shape[-1]
    fits = half and alike and attn_mask is None and query.shape[-1] <= FLASH_HEAD_DIM
    if fits and backend != "efficient":
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    bias = _additive(attn_mask, query)
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale
    )[0]


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


def _listed(tensor: torch.Tensor) -> Any:
    """Return ``tolist()``, for which the host waits for a copy.

    Unknown integers, which may be sizes, raise ``ModelError``; other unknown numbers are zeros, like those of
    ``.cpu()``.
    """
    if known(tensor) is None and not tensor.is_floating_point():
        if tensor.dim() == 0:
            return tensor.item()
        raise ModelError(
            "tolist(): a capture has no values; where sizes depend on data, give typical ones; values that are only "
            "shown may be zeros: .cpu().tolist()"
        )
    return tensor.cpu().tolist()


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``torch.tensor`` on numbers of the script, and note their values. Single numbers on the GPU among them are
    read.
    """
    data = _numbers(args[0] if args else kwargs.get("data"))
    result = func(data, *args[1:], **{key: value for key, value in kwargs.items() if key != "data"})
    if result.device.type == "meta" and not isinstance(data, torch.Tensor) and result.numel() <= LIMIT:
        with torch._C.DisableTorchFunction():
            know(result, torch.tensor(data, dtype=result.dtype, device="cpu"))
    return result


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


def _property(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an attribute of a tensor, with location attributes as on the GPU."""
    place = _PLACE.get(getattr(func.__self__, "__name__", ""))
    return place() if place is not None and args[0].is_meta else func(*args, **kwargs)


def _on_meta(
    name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Replace ``cuda`` as a device by the meta device."""
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
