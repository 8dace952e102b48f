"""Operator trace of the host: the common form of captures and execution traces.

An :class:`OperatorTrace` lists the operators called by one rank, their order and nesting, and their tensors. It has no
times (a profile adds them) and no kernels: :mod:`e2e.lowering` turns operators into device work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from e2e.step.named_ranges import NamedRanges

Phase = Literal["forward", "backward", "optimizer", "data", "other"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor as seen by an operator."""

    # Id of the tensor object.
    id: int
    # Id of the memory, shared by views.
    storage: int
    # Elements per dimension.
    shape: tuple[int, ...]
    # As in :mod:`costmodel.operators.layers` (``float32``, ``bfloat16`` ...).
    dtype: str
    # ``cuda:0``, ``cpu`` ...
    device: str
    # Strides in elements; None if the source does not give them.
    stride: tuple[int, ...] | None = None


# Prefix of captured launches of Triton kernels.
TRITON = "triton::"
# Attribute of calls in a forward pass that runs again inside the backward pass.
RECOMPUTED = "recomputed"
# Arguments of operators: tensors, numbers, texts, ``None``, and (nested) tuples of these.
Value = Tensor | int | float | bool | str | None | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call."""

    id: int
    # Name in the framework (``aten::addmm``, ``c10d::allreduce_`` ...), without the overload.
    name: str
    # Id of the enclosing call, None at the top level.
    parent: int | None
    # Host thread: 0 is the main thread, 1 the autograd thread.
    thread: int
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    # As marked by the source; lowering completes it (:func:`e2e.step.call_phases.settled_phases`).
    phase: Phase = "other"
    # Links a backward operator with its forward operator.
    sequence: int | None = None
    # Path of the ``nn.Module`` that runs the call, if known.
    module: str = ""
    # Other information of the source (process group, overload).
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorTrace:
    """Calls of one rank in the order in which they began (a parent before its children)."""

    calls: tuple[OperatorCall, ...]
    rank: int = 0
    world_size: int = 1
    # Name -> ranks.
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # File or model, for messages.
    source: str = ""
    # Process id of the recorded process, if any.
    pid: int | None = None
    # True if the model requests ``torch.compile``; the calls are those of eager code all the same.
    compiled: bool = False
    # Ranges of the step named by the script.
    ranges: NamedRanges = field(default_factory=NamedRanges)
    # For each backward pass, the lengths along the first dimension of the inputs and outputs of the whole module before
    # it; a step that accumulates gradients has several passes. Empty if the source does not give them.
    passes: tuple[frozenset[int], ...] = ()


def tensors(values: tuple[Value, ...]) -> Iterator[Tensor]:
    """Iterate over all tensors in ``values``, including nested ones, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)
