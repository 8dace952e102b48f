"""Results of operators without data: shapes as on CUDA, fixed values where data would decide.

Meta kernels handle almost all operators. The rest are reads of a value by the host, copies off the device, and
operators whose shape depends on values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from e2e.capture.known_values import LIMIT, know, known

aten = torch.ops.aten


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``func`` on tensors without data."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, *args, **kwargs)
    if func.name().startswith(("aten::_foreach_", "aten::_fused_")) and _of_meta(args[0]):
        return _foreach(func, *args, **kwargs)
    return func(*args, **kwargs)


def _foreach(func: Any, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a foreach operator, in place or as a new list, without computing shapes tensor by tensor."""
    if not func._schema.returns:
        return None
    if func.name() in _FOREACH_ALIKE and len(func._schema.returns) == 1:
        return [torch.empty_like(tensor) for tensor in tensors]
    return func(tensors, *args, **kwargs)


def _of_meta(values: Any) -> bool:
    """True for a list of tensors without data; ``_foreach_pow`` may have a number there."""
    return isinstance(values, (list, tuple)) and len(values) > 0 and _is_meta(values[0])


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _read_scalar(func: Any, tensor: torch.Tensor) -> Any:
    if not _is_meta(tensor):
        return func(tensor)
    values = known(tensor)
    if values is not None:
        return func(values)
    nothing_found = getattr(tensor, "_any_of", False)
    if tensor.dtype is torch.bool:
        return not nothing_found
    if nothing_found:
        return 0.0
    return 1.0 if tensor.dtype.is_floating_point else 1


def _any(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = func(tensor, *args, **kwargs)
    if _is_meta(result):
        result._any_of = True
    return result


def _unscale(func: Any, gradients: Any, found: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Report no overflow of gradients; a loss scaler would otherwise skip the optimizer step."""
    if not _is_meta(found):
        func(gradients, found, inverse_scale)
    found._any_of = True


def _copy_to(func: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Return zeros for copies off the device: their use by the host is its own time, not the GPU's."""
    target = kwargs.get("device")
    if _is_meta(tensor) and target is not None and torch.device(target).type == "cpu":
        values = known(tensor)
        if values is not None:
            return values.to(kwargs.get("dtype") or tensor.dtype, copy=True)
        return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)
    result = func(tensor, **kwargs)
    if _is_meta(result) and not _is_meta(tensor) and not tensor.is_floating_point() and tensor.numel() <= LIMIT:
        know(result, tensor.to(result.dtype, copy=True))
    return result


def _copy_into(func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if not _is_meta(target) and _is_meta(source):
        return target
    return func(target, source, non_blocking)


def _native_dropout(func: Any, tensor: torch.Tensor, p: float, train: bool | None) -> Any:
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


_SHARE: ContextVar[float] = ContextVar("share of elements that are true", default=1.0)


@contextmanager
def true_share(share: float) -> Iterator[None]:
    """Context in which ``nonzero`` finds this fraction of the elements."""
    token = _SHARE.set(share)
    try:
        yield
    finally:
        _SHARE.reset(token)


def _nonzero(func: Any, tensor: torch.Tensor) -> Any:
    """Return all elements, or the fraction set by :func:`true_share`, so that time and memory are not understated."""
    if not _is_meta(tensor):
        return func(tensor)
    values = known(tensor)
    if values is not None:
        places = func(values)
        found = torch.empty((tensor.dim(), places.shape[0]), dtype=torch.int64, device="meta").t()
        know(found, places)
        return found
    rows = math.ceil(tensor.numel() * _SHARE.get())
    return torch.empty((tensor.dim(), rows), dtype=torch.int64, device="meta").t()


def _bincount(func: Any, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Return the minimum number of counts, such as one per expert."""
    if not _is_meta(tensor):
        return func(tensor, weights, minlength)
    dtype = torch.int64 if weights is None else weights.dtype
    return torch.empty(max(minlength, 1), dtype=dtype, device="meta")


def _like_first(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return samples, one per parameter."""
    return torch.empty_like(tensor) if _is_meta(tensor) else func(tensor, *args, **kwargs)


def _never_nested(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Return False: ``nn.TransformerEncoder`` then computes padding too, as with ``enable_nested_tensor=False``."""
    return False


def _ctc_loss(func: Any, scores: torch.Tensor, targets: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the loss of each sample, and the saved states of every time step: twice as many as labels, plus one."""
    if not _is_meta(scores):
        return func(scores, targets, *args, **kwargs)
    batch = scores.shape[1] if scores.dim() == 3 else 1
    longest = targets.shape[-1] if targets.dim() == 2 else -(-targets.numel() // batch)
    states = (batch, scores.shape[0], 2 * longest + 1)
    return scores.new_empty((batch,) if scores.dim() == 3 else ()), scores.new_empty(states)


def _ctc_loss_backward(func: Any, gradient: torch.Tensor, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return torch.empty_like(scores) if _is_meta(scores) else func(gradient, scores, *args, **kwargs)


def _like_second(func: Any, gradient: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return torch.empty_like(tensor) if _is_meta(tensor) else func(gradient, tensor, *args, **kwargs)


def _repeat_interleave(func: Any, repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    """Return the indices given by known repeats; otherwise ``output_size`` must be given."""
    values = known(repeats) if _is_meta(repeats) else None
    if values is None:
        return func(repeats, output_size=output_size)
    places = func(values)
    result = torch.empty(places.shape, dtype=places.dtype, device="meta")
    know(result, places)
    return result


def _equal(func: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
    if not _is_meta(first) and not _is_meta(second):
        return func(first, second)
    values = [known(each) if _is_meta(each) else each for each in (first, second)]
    return func(*values) if all(each is not None for each in values) else True


def _convolution(func: Any, data: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a convolution's output in NHWC if data or weights are (``cudnn_conv_suggest_memory_format`` in
    ConvUtils.h); meta tensors would give NCHW.
    """
    return _laid_out(func(data, weight, *args, **kwargs), (data, weight))


def _convolution_backward(
    func: Any, gradient: torch.Tensor, data: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Return gradients in the forward layout, for any layout of ``gradient``, which is copied if necessary."""
    found = func(gradient, data, weight, *args, **kwargs)
    return tuple(_laid_out(each, (data, weight)) for each in found)


def _as_first(func: Any, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return results of pooling and interpolation in the layout of their first argument."""
    found = func(data, *args, **kwargs)
    return tuple(_laid_out(e, (data,)) for e in found) if isinstance(found, tuple) else _laid_out(found, (data,))


def _as_second(func: Any, gradient: torch.Tensor, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return _laid_out(func(gradient, data, *args, **kwargs), (data,))


def _laid_out(result: Any, sources: Sequence[torch.Tensor]) -> Any:
    """Return ``result``, if 4-d, in NHWC if one of ``sources`` is."""
    if not _is_meta(result) or result.dim() != 4:
        return result
    if not any(torch._prims_common.suggest_memory_format(e) is torch.channels_last for e in sources):
        return result
    return torch.empty_like(result, memory_format=torch.channels_last)


_FOREACH_ALIKE = frozenset(f"aten::_foreach_{name}" for name in ("sqrt", "neg", "reciprocal", "abs", "exp", "sign"))
_SPECIAL: dict[Any, Any] = {
    aten._local_scalar_dense.default: _read_scalar,
    aten.any.default: _any,
    aten._to_copy.default: _copy_to,
    aten.copy_.default: _copy_into,
    aten.native_dropout.default: _native_dropout,
    aten.nonzero.default: _nonzero,
    aten.equal.default: _equal,
    aten.bincount.default: _bincount,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.max_pool2d_with_indices_backward.default: _as_second,
    aten.avg_pool2d.default: _as_first,
    aten.avg_pool2d_backward.default: _as_second,
    aten._adaptive_avg_pool2d_backward.default: _as_second,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten._standard_gamma.default: _like_first,
    aten._sample_dirichlet.default: _like_first,
    aten.poisson.default: _like_first,
    aten.binomial.default: _like_first,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten.multi_margin_loss_backward.default: _like_second,
    aten._nested_tensor_from_mask_left_aligned.default: _never_nested,
}
