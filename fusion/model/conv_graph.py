"""A model as operators that our kernels compute, and all others.

The records hold Relax variables as opaque keys; :mod:`fusion.relax.extract` reads them out of a module, so that
importing this module needs no TVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Pool2d
from schedules.contract.template import Parameters

if TYPE_CHECKING:
    from tvm import relax


@dataclass(frozen=True, eq=False)
class Node:
    """One convolution, dense layer, pooling or normalisation with its epilogue."""

    # Name of the convolution's variable (of the ONNX node); unique.
    name: str
    operator: Conv2d | Pool2d | Dense | ChannelNorm
    data: relax.Var
    residual: relax.Var | None
    # Weights of one layer; empty for pooling.
    parameters: tuple[Parameters, ...]
    # Last of ``covered``, the only one read outside.
    output: relax.Var
    # Variables that one kernel replaces, in program order.
    covered: tuple[relax.Var, ...]
    # Number of its binding block; variables local to a block cannot be read in another.
    block: int = 0
    # Factors of ``data`` per image and channel.
    gate: relax.Var | None = None


@dataclass(frozen=True, eq=False)
class Other:
    """A call that no node covers. ``operator``: TVM's name, e.g. ``relax.nn.softmax``; ``reason``: why."""

    name: str
    operator: str
    output: relax.Var
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Graph:
    """A network; nodes and others are in program order of their outputs."""

    nodes: tuple[Node, ...]
    others: tuple[Other, ...] = ()
    # Number of uses of each variable.
    counts: Mapping[relax.Var, int] = field(default_factory=dict)
    # Variables computed from each variable.
    readers: Mapping[relax.Var, tuple[relax.Var, ...]] = field(default_factory=dict)

    def use_counts(self) -> Mapping[relax.Var, int]:
        """Number of reads of each variable, as an argument or as a result of the function."""
        return self.counts
