"""Results of operators without data: shapes as on CUDA, fixed values where data would decide.

Meta kernels handle almost all operators. The rest are reads of a value by the host, copies off the device, and
operators whose shape depends on values. Such operators are decomposed as on CUDA (:data:`SELECTIONS`): ``nonzero`` of a
mask, which the host waits for, then an index. The number of elements selected by a mask is an assumption (all that can
be true, :mod:`e2e.capture.possible_values`), which a prediction of a script states.

Results that depend only on shapes are computed once per capture (:class:`KnownResults`): identical layers repeat the
same calls, and PyTorch computes shapes in Python. Only calls that create all of their results are cached, and only if a
new tensor of the same shape and strides is the same in every respect.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from e2e.capture.known_values import LIMIT, know, known
from e2e.capture.possible_values import is_certain, most_true, true_for_certain
from e2e.capture.script_lines import flag_of_running_line

aten = torch.ops.aten
# Real numbers of the host, at most, that are known on the GPU: boxes and key points of an image.
_FEW = 4096
# Largest bound that only degenerate numbers lie below.
_TINY = 1e-6
# Bytes of zeros that are not written at once.
_LARGE = 1 << 20


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``func`` on tensors without data."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, *args, **kwargs)
    if func.name().startswith(("aten::_foreach_", "aten::_fused_")) and _of_meta(args[0]):
        return _foreach(func, *args, **kwargs)
    return func(*args, **kwargs)


def _as_held(func: Any, tensor: torch.Tensor, **kwargs: Any) -> Any:
    """Return a copy of a sparse tensor, coalesced or not: as many values as it holds, as if no two had one place.
    PyTorch's own copies without data hold none.
    """
    if tensor.layout is not torch.sparse_coo or not _is_meta(tensor):
        return func(tensor, **kwargs)
    return aten._sparse_coo_tensor_with_dims_and_tensors.default(
        tensor.sparse_dim(), tensor.dense_dim(), tensor.shape, tensor._indices(), tensor._values(),
        dtype=tensor.dtype, layout=tensor.layout, device=tensor.device,
    )  # fmt: skip


def _add_in_place(func: Any, tensor: torch.Tensor, other: Any, **kwargs: Any) -> Any:
    """Return the sum with a tensor or a number; PyTorch's own of a sparse tensor without data fails."""
    sparse = isinstance(other, torch.Tensor) and other.layout is torch.sparse_coo and _is_meta(tensor)
    return tensor if sparse else func(tensor, other, **kwargs)


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
        wanted = flag_of_running_line()
        return not nothing_found if wanted is None else wanted
    if nothing_found:
        return 0.0
    return 1.0 if tensor.dtype.is_floating_point else 1


def _any(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = func(tensor, *args, **kwargs)
    if _is_meta(result):
        result._any_of = True
    return result


def _below(func: Any, tensor: torch.Tensor, bound: Any) -> Any:
    """Return a flag that is read as false where numbers are compared with next to nothing (``istft``'s window)."""
    result = func(tensor, bound)
    if _is_meta(result) and 0 < abs(bound) <= _TINY:
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
        dtype = kwargs.get("dtype") or tensor.dtype
        if tensor.dim() == 0 and dtype.is_floating_point:  # the value that .item() returns
            return torch.ones((), dtype=dtype)
        return _zeros(tensor.shape, dtype)
    result = func(tensor, **kwargs)
    if _is_meta(result) and not _is_meta(tensor) and _tells(tensor):
        know(result, tensor.to(result.dtype, copy=True))
    return result


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros of which large ones take memory when they are written only: a whole model may be copied to the
    host.
    """
    count = shape.numel() * dtype.itemsize
    if count < _LARGE:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count), dtype=dtype).view(shape)


def _tells(tensor: torch.Tensor) -> bool:
    """True for values of the host that may decide sizes: whole numbers, and few real ones, such as boxes, unless they
    are all alike, as data that is made up.
    """
    if not tensor.is_floating_point():
        return tensor.numel() <= LIMIT
    few = tensor.numel() <= _FEW and tensor.layout is torch.strided
    return few and (tensor.numel() <= 1 or bool((tensor != tensor.reshape(-1)[0]).any()))


def _copy_into(func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
    if not _is_meta(target) and _is_meta(source):
        values = known(source)
        if values is None:
            return target
        source = values
    return func(target, source, non_blocking)


def _native_dropout(func: Any, tensor: torch.Tensor, p: float, train: bool | None) -> Any:
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _nonzero(func: Any, tensor: torch.Tensor) -> Any:
    """Return all elements that can be true, so that time and memory are not understated, or a share of them."""
    if not _is_meta(tensor):
        return func(tensor)
    values = known(tensor)
    if values is not None:
        places = func(values)
        found = torch.empty((tensor.dim(), places.shape[0]), dtype=torch.int64, device="meta").t()
        know(found, places)
        return found
    return torch.empty((tensor.dim(), most_true(tensor)), dtype=torch.int64, device="meta").t()


def _bincount(func: Any, tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    """Return the minimum number of counts, such as one per expert; even ones, so that sizes can follow from them."""
    if not _is_meta(tensor):
        return func(tensor, weights, minlength)
    bins = max(minlength, 1)
    result = torch.empty(bins, dtype=torch.int64 if weights is None else weights.dtype, device="meta")
    if known(tensor) is None and weights is None:
        know(result, _even(tensor.numel(), bins))
    return result


def _histc(func: Any, tensor: torch.Tensor, bins: int = 100, *args: Any, **kwargs: Any) -> Any:
    """Return even counts."""
    if not _is_meta(tensor):
        return func(tensor, bins, *args, **kwargs)
    result = tensor.new_empty(bins)
    if known(tensor) is None:
        know(result, _even(tensor.numel(), bins).to(result.dtype))
    return result


def _summed(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return even counts of a mask of which as many elements are true as were set, such as a token's experts."""
    result = func(tensor, *args, **kwargs)
    number = true_for_certain(tensor) if _is_meta(tensor) else None
    if number is not None:
        know(result, _even(number, result.numel()).view(result.shape).to(result.dtype))
    return result


def _even(number: int, bins: int) -> torch.Tensor:
    share, left = divmod(number, bins)
    return share + (torch.arange(bins, device="cpu") < left).long()


def _like_first(func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return samples, one per parameter."""
    return torch.empty_like(tensor) if _is_meta(tensor) else func(tensor, *args, **kwargs)


def _never_nested(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Return False for ``_nested_tensor_from_mask_left_aligned``: ``TransformerEncoder`` then computes padding too."""
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


def _shared_moments(func: Any, data: torch.Tensor, *args: Any) -> Any:
    """Return sums or moments of each channel in float32: two, or four with the gradients of weight and bias."""
    if not _is_meta(data):
        return func(data, *args)
    count = 4 if func is aten.batch_norm_backward_reduce.default else 2
    channels = data.shape[1]
    return tuple(torch.empty(channels, dtype=torch.float32, device="meta") for _ in range(count))


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
    if getattr(first, "_any_of", False):  # false, which is compared with true (`istft`)
        return False
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
    aten.lt.Scalar: _below,
    aten.any.default: _any,
    aten._to_copy.default: _copy_to,
    aten.copy_.default: _copy_into,
    aten.native_dropout.default: _native_dropout,
    aten.clone.default: _as_held,
    aten._coalesce.default: _as_held,
    aten.add_.Tensor: _add_in_place,
    aten.nonzero.default: _nonzero,
    aten.equal.default: _equal,
    aten.batch_norm_stats.default: _shared_moments,
    aten.batch_norm_gather_stats_with_counts.default: _shared_moments,
    aten.batch_norm_backward_reduce.default: _shared_moments,
    aten.batch_norm_elemt.default: _like_first,
    aten._dirichlet_grad.default: _like_first,
    aten.batch_norm_backward_elemt.default: _like_first,
    aten.bincount.default: _bincount,
    aten.histc.default: _histc,
    aten.sum.dim_IntList: _summed,
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


# (shape, stride, dtype) of each result, and True if the operator returns one tensor, not a tuple of them.
_Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Results = tuple[tuple[_Layout, ...], bool]


class _UnfitError(Exception):
    """Raised for an argument that cannot be part of a cache key."""


class KnownResults:
    """Cached execution of operators on tensors without data; ``hits`` counts the calls that were not computed again."""

    def __init__(self) -> None:
        self.hits = 0
        self._known: dict[Any, _Results | None] = {}
        self._pure: dict[Any, bool] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run ``func`` as :func:`e2e.capture.meta_results.run` does."""
        if not self._makes_results(func):
            return run(func, args, kwargs)
        try:
            key = (func, _signature(args), _signature(tuple(kwargs.items())) if kwargs else ())
        except _UnfitError:
            return run(func, args, kwargs)
        if key in self._known:
            known = self._known[key]
            if known is not None:
                self.hits += 1
                return _new_tensors(known)
            return run(func, args, kwargs)
        result = run(func, args, kwargs)
        self._known[key] = _results(result, (*args, *kwargs.values()))
        return result

    def _makes_results(self, func: Any) -> bool:
        """True if, by its schema, the operator writes nothing and returns no view."""
        known = self._pure.get(func)
        if known is None:
            schema = func._schema
            values = (*schema.arguments, *schema.returns)
            known = func.namespace == "aten" and bool(schema.returns) and all(v.alias_info is None for v in values)
            # Results that depend on values, or on the settings of the session, are excluded.
            known = known and torch.Tag.data_dependent_output not in func.tags
            self._pure[func] = known = known and torch.Tag.dynamic_output_shape not in func.tags
        return known


def _signature(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return a key of all arguments that results depend on; types are included, since 1, 1.0 and ``True`` are equal."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(_of_tensor(value))
        elif isinstance(value, (tuple, list)):
            found.append(_signature(value))
        elif value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
            found.append((type(value), value))
        elif isinstance(value, (torch.memory_format, torch.layout)):
            found.append(value)
        else:
            raise _UnfitError
    return tuple(found)


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    if not plain or tensor.device.type != "meta" or tensor.layout is not torch.strided or tensor.is_complex():
        raise _UnfitError
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _results(result: Any, arguments: Sequence[Any]) -> _Results | None:
    """Return the layout of ``result``; None if one of its tensors is not new, dense and with its own storage."""
    alone = isinstance(result, torch.Tensor)
    found = (result,) if alone else tuple(result) if isinstance(result, tuple) else ()
    if not found or not all(isinstance(tensor, torch.Tensor) and _is_plain(tensor) for tensor in found):
        return None
    memory = [tensor.untyped_storage()._cdata for tensor in (*found, *_tensors(arguments))]
    if len(set(memory[: len(found)])) < len(found) or set(memory[: len(found)]) & set(memory[len(found) :]):
        return None
    known = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in found), alone
    made = _new_tensors(known)
    alike = all(
        first.untyped_storage().nbytes() == second.untyped_storage().nbytes() and not vars(first)
        for first, second in zip(found, (made,) if alone else made, strict=True)
    )
    return known if alike else None


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "meta" and tensor.layout is torch.strided


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
    return found


def _new_tensors(known: _Results) -> Any:
    layouts, alone = known
    made = tuple(torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in layouts)
    return made[0] if alone else made


# Calls that indicate an assumed size, and those with assumed counts.
ASSUMED = "aten::nonzero"
EVEN_COUNTS = ("aten::bincount", "aten::histc", "aten::sum")


def is_assumed(name: str, tensor: torch.Tensor) -> bool:
    """True if the call ``name`` of one of these on ``tensor`` has a result that depends on data that is not there."""
    if not _is_meta(tensor) or known(tensor) is not None or is_certain():
        return False
    certain = true_for_certain(tensor) is not None
    return certain if name == "aten::sum" else not certain or name != ASSUMED


@dataclass(frozen=True)
class Selection:
    """Decomposition of an operator. ``applies``: predicate of the arguments for a dependence on data; ``apart``: the
    call by other operators.
    """

    applies: Callable[[Sequence[Any]], bool]
    apart: Callable[..., Any]


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta" and value.dtype in (torch.bool, torch.uint8)


def _has_mask(args: Sequence[Any]) -> bool:
    return any(_is_mask(index) for index in args[1])


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace every mask by the indices that it selects, one tensor for each of its dimensions."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        found += aten.nonzero(index).unbind(1) if _is_mask(index) else [index]  # type: ignore[union-attr]
    return found


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    return aten.index.Tensor(tensor, [each for index in _without_masks(indices) for each in _on_gpu(index)])


def _has_index_of_host(args: Sequence[Any]) -> bool:
    return _is_meta(args[0]) and any(isinstance(each, torch.Tensor) and not _is_meta(each) for each in args[1])


def _on_gpu(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return an index of the host on the GPU, a mask as the indices that it selects: copies that the host waits for, of
    a backward pass once more (``make_info`` in TensorAdvancedIndexing.cpp).
    """
    if index is None or _is_meta(index):
        return [index]
    found = index.nonzero().unbind(1) if index.dtype in (torch.bool, torch.uint8) else [index]
    return [aten._to_copy.default(each, device="meta") for each in found]


def _indexed(func: Any) -> Selection:
    """Return ``func``, which writes to indices, after their copies to the GPU."""

    def apart(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *args: Any, **kwargs: Any) -> Any:
        return func(tensor, [each for index in indices for each in _on_gpu(index)], *args, **kwargs)

    return Selection(_has_index_of_host, apart)


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> Any:
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return aten.index.Tensor(tensor, _without_masks([mask]))


def _unique(tensor: torch.Tensor, ordered: bool = True, inverse: bool = False, counts: bool = False) -> Any:
    """Decompose ``unique``: sort, comparison with the neighbour, selection; the inverse also takes a running sum and a
    scatter.
    """
    values, places = aten.sort.default(tensor.reshape(-1))
    chosen = aten.nonzero(aten.ne.Tensor(values, values)).unbind(1)
    unique = aten.index.Tensor(values, list(chosen))
    back = aten.scatter.src(places, 0, places, aten.cumsum(places, 0)) if inverse else places.new_empty(0)
    number = aten.diff(chosen[0]) if counts else places.new_empty(0)
    return unique, back.reshape(tensor.shape) if inverse else back, number


def _unique_consecutive(tensor: torch.Tensor, inverse: bool = False, counts: bool = False, dim: Any = None) -> Any:
    """Decompose ``unique_consecutive``: as ``unique`` without the sort."""
    values = tensor.reshape(-1)
    chosen = aten.nonzero(aten.ne.Tensor(values, values)).unbind(1)
    unique = aten.index.Tensor(values, list(chosen))
    places = torch.empty(0, dtype=torch.int64, device=tensor.device)
    back = aten.cumsum(chosen[0], 0).reshape(tensor.shape) if inverse else places
    return unique, back, aten.diff(chosen[0]) if counts else places


def _non_maximum(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> Any:
    """Decompose ``torchvision::nms``: sort, bits for all pairs of boxes, selection of those that are kept."""
    order = aten.sort.default(scores, 0, True)[1]
    aten.bitwise_not.default(order.new_empty((boxes.shape[0], math.ceil(boxes.shape[0] / 64))))
    return aten.index.Tensor(order, list(aten.nonzero(aten.ne.Tensor(scores, scores)).unbind(1)))


# By operator, or by its name where PyTorch does not define it.
SELECTIONS: dict[Any, Selection] = {
    "torchvision::nms": Selection(lambda args: args[0].device.type == "meta", _non_maximum),
    aten.index.Tensor: Selection(lambda args: _has_mask(args) or _has_index_of_host(args), _index),
    aten.index_put.default: _indexed(aten.index_put.default),
    aten.index_put_.default: _indexed(aten.index_put_.default),
    aten._index_put_impl_.default: _indexed(aten._index_put_impl_.default),
    aten.masked_select.default: Selection(lambda args: _is_mask(args[1]), _masked_select),
    aten._unique2.default: Selection(lambda args: args[0].device.type == "meta", _unique),
    aten.unique_consecutive.default: Selection(lambda args: args[0].device.type == "meta", _unique_consecutive),
}
