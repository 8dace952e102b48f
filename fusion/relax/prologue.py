"""Operators before a convolution that its kernel applies as it reads its input: a gate, a batch norm, an activation.

``x [* gate] [* scale + shift] [activation]``, in this order. Operators that the preceding kernel applies to its output
stay there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax

from costmodel.operators.layers import Conv2d, Prologue
from fusion.model.conv_graph import Node
from fusion.relax.activations import Activation, activation_before
from fusion.relax.bindings import Program, image_shape, is_float32, operator_name, same_type
from fusion.relax.epilogue import per_channel

# With fewer channels a kernel reads the plain image, which only the first layer of a network does.
_FEWEST_CHANNELS = 8
# Each convolution that reads a tensor would repeat its prologue.
_MOST_READERS = 2


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Computation of a convolution's input from ``data``."""

    data: relax.Var
    # The variables in between, in program order.
    covered: tuple[relax.Var, ...]
    gate: relax.Var | None = None
    activation: Activation | None = None
    scale: np.ndarray | None = None
    shift: np.ndarray | None = None

    @property
    def prologue(self) -> Prologue | None:
        if self.activation is None and self.scale is None:
            return None
        name, slope = (None, 0.0) if self.activation is None else (self.activation.name, self.activation.slope)
        return Prologue(self.scale is not None, name, slope)


def absorb_before(program: Program, nodes: Sequence[Node]) -> list[Node]:
    """Return ``nodes`` (all of a program), their convolutions with the operators before them as prologues.

    A prologue on a tensor is used only if all readers of the tensor can apply it.
    """
    claimed = {var for node in nodes for var in node.covered}
    readers: dict[relax.Var, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        readers[node.data].append(index)
    result = list(nodes)
    for var, indices in readers.items():
        if not _all_read_it_here(program, var, [nodes[index] for index in indices]):
            continue
        prepared = [_before(program, nodes[index], claimed) for index in indices]
        if len({None if found is None else found.covered for found in prepared}) > 1:
            continue  # applied for all readers, as one of them does not support it
        for index, found in zip(indices, prepared, strict=True):
            if found is not None:
                result[index] = _with(nodes[index], found)
    return result


def _all_read_it_here(program: Program, var: relax.Var, nodes: Sequence[Node]) -> bool:
    """True if ``nodes`` are all readers of ``var``, few convolutions, in the block that defines it."""
    if var not in program.position or len(nodes) > _MOST_READERS or len(program.users.get(var, ())) != len(nodes):
        return False
    return all(node.block == program.block[program.position[var]] for node in nodes)


def _before(program: Program, node: Node, claimed: Collection[relax.Var]) -> _Prepared | None:
    """Return the prologue that ``node`` can apply to its data; None if there is none."""
    conv, shape = node.operator, image_shape(node.data)
    if not isinstance(conv, Conv2d) or shape is None or conv.dtype == "int8":
        return None
    walk = _Walk(program, node.data, claimed)
    if conv.groups == 1 and shape[1] >= _FEWEST_CHANNELS:
        walk.take_activation()
        walk.take_affine()
    if conv.is_pointwise and shape[2:] != (1, 1):
        walk.take_gate()
    return walk.found()


def _with(node: Node, found: _Prepared) -> Node:
    (parameters,) = node.parameters
    assert isinstance(node.operator, Conv2d)
    return replace(
        node,
        operator=replace(node.operator, gated=found.gate is not None, prologue=found.prologue),
        data=found.data,
        gate=found.gate,
        parameters=(replace(parameters, input_scale=found.scale, input_shift=found.shift),),
        covered=(*found.covered, *node.covered),
    )


class _Walk:
    """Walk backwards from ``start``, one step at a time, up to a value with another reader."""

    def __init__(self, program: Program, start: relax.Var, claimed: Collection[relax.Var]) -> None:
        self._program, self._claimed = program, claimed
        self._start = self._at = start
        self._covered: list[relax.Var] = []
        self._gate: relax.Var | None = None
        self._activation: Activation | None = None
        self._scale: np.ndarray | None = None
        self._shift: np.ndarray | None = None

    def found(self) -> _Prepared | None:
        """Return the operators that were absorbed, or None."""
        if not self._covered:
            return None
        return _Prepared(self._at, tuple(self._covered), self._gate, self._activation, self._scale, self._shift)

    def take_activation(self) -> None:
        """Absorb an activation that ends at the current value."""
        if self._binding() is None:
            return
        found = activation_before(self._program, self._at)
        if found is not None and not any(var in self._claimed for var in found[2]):
            self._activation, source, covered = found
            self._step(source, covered)

    def take_affine(self) -> None:
        """Absorb constants along the channels: factors and summands, in any order."""
        steps: list[tuple[str, np.ndarray]] = []
        while (binding := self._binding()) is not None:
            name, shape = operator_name(binding.value), image_shape(self._at)
            if name not in ("relax.add", "relax.multiply") or shape is None:
                break
            source, constant = binding.value.args[0], self._program.constant(binding.value.args[1])
            vector = None if constant is None else per_channel(constant, shape, 1)
            if vector is None or not isinstance(source, relax.Var) or not same_type(source, self._at):
                break
            steps.append((name, vector))
            self._step(source, (self._at,))
        if not steps:
            return
        scale, shift = np.ones(len(steps[0][1])), np.zeros(len(steps[0][1]))
        for name, vector in reversed(steps):
            if name == "relax.multiply":
                scale, shift = scale * vector, shift * vector
            else:
                shift = shift + vector
        self._scale, self._shift = scale.astype(np.float32), shift.astype(np.float32)

    def take_gate(self) -> None:
        """Absorb a product with one factor per image and channel (squeeze-and-excite)."""
        binding, shape = self._binding(), image_shape(self._at)
        if binding is None or shape is None or operator_name(binding.value) != "relax.multiply":
            return
        for data, factors in (binding.value.args, reversed(binding.value.args)):
            if not isinstance(data, relax.Var) or not isinstance(factors, relax.Var):
                continue
            if self._program.is_constant(factors) or not is_float32(factors) or image_shape(data) != shape:
                continue
            if image_shape(factors) == (shape[0], shape[1], 1, 1):
                self._gate = factors
                self._step(data, (self._at,))
                return

    def _step(self, source: relax.Var, covered: Sequence[relax.Var]) -> None:
        self._covered = [*covered, *self._covered]
        self._at = source

    def _binding(self) -> relax.VarBinding | None:
        """Return the binding of the current value if no kernel writes it and only the absorbed operators read it; else
        None.
        """
        var, program = self._at, self._program
        if var not in program.position or var in self._claimed or not is_float32(var):
            return None
        binding, block = program.bindings[program.position[var]], program.block[program.position[var]]
        alone = var == self._start or len(program.users.get(var, ())) == 1
        if not alone or block != program.block[program.position[self._start]] or program.is_constant(binding.value):
            return None
        return binding
