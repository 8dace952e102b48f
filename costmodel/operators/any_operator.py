"""All operators together: their union, their JSON form, and their FLOPs as counted for MFU and HFU.

JSON form: a mapping with the type's name under ``"type"`` and the dataclass fields beside it.

FLOPs: products, convolutions and attention, masked or not. The convention is that of PaLM (Chowdhery et al., arXiv
2204.02311, appendix B), shared by PyTorch's ``FlopCounterMode``, llm-foundry and torchtitan. A multiply-accumulate
is two; element-wise work, norms, softmax and optimizers count as zero; attention counts every query with every key,
even those excluded by a causal mask, so that the figure does not depend on the kernel (eager products compute masked
pairs too). Pairs excluded by a window or the borders of packed documents are never computed and do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, get_args

from costmodel.operators.attention import Attention, CausalConvolution, LinearAttention
from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.device_work import ConvolutionBackward, DeviceOperator, Gemm, ScaledGemm, StoredGemm
from costmodel.operators.experts import ExpertLayer, GroupedGemm
from costmodel.operators.layers import Conv2d, Dense, Epilogue, FusedConvs, Operator, Prologue
from costmodel.operators.lookups import IndexStatistics, TableLookup

AnyOperator = Operator | DeviceOperator | CollectiveTransfer


def dtype_of(operator: AnyOperator) -> str:
    """Dtype of ``operator``; empty for one without, such as a copy."""
    return str(getattr(operator, "dtype", ""))


# Operators, and record types of their fields.
_TYPES: dict[str, Any] = {
    cls.__name__: cls for cls in (*get_args(AnyOperator), Epilogue, Prologue, TableLookup, IndexStatistics)
}


def to_record(value: Any) -> Any:
    """JSON-able data of ``value`` (an operator or one of its fields)."""
    if type(value).__name__ in _TYPES:
        content = {item.name: to_record(getattr(value, item.name)) for item in fields(value)}
        return {"type": type(value).__name__, **content}
    if isinstance(value, tuple):
        return [to_record(item) for item in value]
    return value


def from_record(record: Any) -> Any:
    """Operator from data of :func:`to_record`; ``ValueError`` for anything else."""
    if isinstance(record, list):
        return tuple(from_record(item) for item in record)
    if not isinstance(record, dict):
        return record
    content = dict(record)
    name = content.pop("type", None)
    if name not in _TYPES:
        raise ValueError(f"unknown operator type {name!r}, known: {', '.join(_TYPES)}")
    known = {item.name: item for item in fields(_TYPES[name]) if item.init}
    unknown = sorted(set(content) - set(known))
    missing = sorted(set(_required(known.values())) - set(content))
    if unknown or missing:
        raise ValueError(f"malformed {name}: missing {missing}, not known {unknown}")
    return _TYPES[name](**{key: from_record(item) for key, item in content.items()})


def _required(known: Iterable[Field[Any]]) -> Iterator[str]:
    return (item.name for item in known if item.default is MISSING and item.default_factory is MISSING)


_PRODUCTS = (Gemm, ScaledGemm, StoredGemm, GroupedGemm, ExpertLayer, Conv2d, ConvolutionBackward, FusedConvs, Dense)


@dataclass(frozen=True, slots=True)
class CountedFlops:
    """FLOPs of one run of an operator. ``model``: needed for its result; ``executed``: including the kernel's
    recomputation for the backward pass, such as the scores of fused attention.
    """

    model: int
    executed: int


NO_FLOPS = CountedFlops(0, 0)


def counted_flops(operator: AnyOperator) -> CountedFlops:
    """FLOPs of ``operator`` by the convention above; zero for anything but products."""
    if isinstance(operator, _PRODUCTS):
        return CountedFlops(operator.flops, operator.flops)
    if isinstance(operator, Attention):
        return _attention(operator)
    if isinstance(operator, LinearAttention | CausalConvolution):
        # Backward: gradients of two operands; the rest of `flops` is the recomputed forward pass.
        again = operator.flops // 3 if operator.direction == "backward" else 0
        return CountedFlops(operator.flops - again, operator.flops)
    return NO_FLOPS


def _attention(operator: Attention) -> CountedFlops:
    scored, mixed = operator.widths
    pairs = sum(queries * min(keys, operator.window or keys) for queries, keys in operator.pieces)
    each = 2 * operator.batch * operator.heads * pairs
    if operator.direction == "forward":
        return CountedFlops(each * (scored + mixed), each * (scored + mixed))
    return CountedFlops(each * 2 * (scored + mixed), each * (3 * scored + 2 * mixed))
