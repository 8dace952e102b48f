"""A model as the operators that kernels of ours compute, and everything else.

The records hold Relax variables as opaque keys; reading them out of a module is :mod:`fusion.relax.extract`, so that
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
    """One convolution, dense layer, pooling or normalisation with its epilogue.

    ``covered``: the variables that one kernel replaces, in program order; ``output`` is the last of them and the only
    one that anything outside reads. ``name`` is that of the variable of the convolution (of the ONNX node), and unique.
    ``parameters`` holds the weights of one layer, or nothing for pooling. ``block``: number of the binding block it
    stands in; what one block computes for itself cannot be read in another. ``gate``: the factors of ``data``, for each
    image and channel.
    """

    name: str
    operator: Conv2d | Pool2d | Dense | ChannelNorm
    data: relax.Var
    residual: relax.Var | None
    parameters: tuple[Parameters, ...]
    output: relax.Var
    covered: tuple[relax.Var, ...]
    block: int = 0
    gate: relax.Var | None = None


@dataclass(frozen=True, eq=False)
class Other:
    """A call that no node covers. ``operator``: TVM's name of it, such as ``relax.nn.softmax``; ``reason``: why."""

    name: str
    operator: str
    output: relax.Var
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Graph:
    """``nodes`` and ``others`` in program order (of their outputs); ``counts``: uses of each variable; ``readers``: the
    variables that are computed from each.
    """

    nodes: tuple[Node, ...]
    others: tuple[Other, ...] = ()
    counts: Mapping[relax.Var, int] = field(default_factory=dict)
    readers: Mapping[relax.Var, tuple[relax.Var, ...]] = field(default_factory=dict)

    def use_counts(self) -> Mapping[relax.Var, int]:
        """How often each variable is read, as an argument or as a result of the function."""
        return self.counts
