"""What a framework did on the host, operator by operator: the common form of captures and execution traces.

An :class:`OperatorTrace` says which operators one rank called, in which order and nesting, on which tensors. It has no
times (a profile adds them) and knows no kernels: :mod:`e2e.lowering` turns operators into device work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from e2e.step.named_ranges import NamedRanges

Phase = Literal["forward", "backward", "optimizer", "data", "other"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as an operator saw it. ``id`` names the object, ``storage`` the memory behind it, which views share.

    ``shape`` and ``stride`` in elements; ``dtype`` as in :mod:`costmodel.operators.layers` (``float32``, ``bfloat16``
    ...);
    ``device`` is ``cuda:0``, ``cpu`` ...; ``stride`` is ``None`` where the source does not tell.
    """

    id: int
    storage: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    stride: tuple[int, ...] | None = None


# Of captured launches of kernels in Triton: in front of their names.
TRITON = "triton::"
# Attribute of calls of a forward pass that runs again inside the backward pass.
RECOMPUTED = "recomputed"
# What an operator is called with: tensors, numbers, texts, ``None``, and (nested) tuples of them.
Value = Tensor | int | float | bool | str | None | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call. ``name`` is the framework's (``aten::addmm``, ``c10d::allreduce_`` ...), without the overload.

    ``parent``: id of the call around it, ``None`` at the top level. ``thread``: the host thread, 0 is the main one,
    1 the autograd thread. ``sequence`` links a backward operator with its forward one. ``module``: path of the
    ``nn.Module`` it runs in, where known. ``phase``: as the source marks it; lowering settles what that leaves open
    (:mod:`e2e.step.call_phases`). ``attributes``: what the source says besides (process group, overload).
    """

    id: int
    name: str
    parent: int | None
    thread: int
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    phase: Phase = "other"
    sequence: int | None = None
    module: str = ""
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class OperatorTrace:
    """Calls of one rank in the order they began (a parent before its children).

    ``process_groups``: name -> the ranks in it. ``source`` names the file or the model, for messages. ``pid``: of the
    recorded process, where there was one. ``compiled``: the model asks for ``torch.compile``; the calls are those of
    eager code all the same. ``ranges``: parts of the step that the script gave a name. ``passes``: of every backward
    pass, the lengths along the first dimension of what the whole module was called with, and returned, before it; a
    step that accumulates gradients has several. Empty where the source does not tell.
    """

    calls: tuple[OperatorCall, ...]
    rank: int = 0
    world_size: int = 1
    process_groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    source: str = ""
    pid: int | None = None
    compiled: bool = False
    ranges: NamedRanges = field(default_factory=NamedRanges)
    passes: tuple[frozenset[int], ...] = ()


def tensors(values: tuple[Value, ...]) -> Iterator[Tensor]:
    """All tensors in ``values``, nested ones too, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors(value)
