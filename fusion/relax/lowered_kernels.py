"""Kernels and constants that are added to a lowered module, each once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, s_tir, tirx

from costmodel.operators.layers import Conv2d, Operator, Pool2d
from fusion.model.selection import Group
from fusion.relax.bindings import OPAQUE
from fusion.relax.byte_calls import ByteMean, BytePair, ByteStep, ByteTable, ByteWindow
from fusion.relax.byte_kernels import (
    channel_table_kernel,
    gate_kernel,
    mean_kernel,
    pair_kernel,
    table_kernel,
    window_kernel,
)
from fusion.relax.byte_kernels import resize_kernel as byte_resize_kernel
from fusion.relax.byte_resize import ByteResize
from fusion.relax.channel_kernels import channel_move
from fusion.relax.channel_moves import ChannelMove
from fusion.relax.group_norm_kernels import GroupNorm2d, channel_statistics, group_norm, statistics_shape
from fusion.relax.layout_kernels import blocked_to_rows, rows_to_blocked, to_blocked, to_plain
from fusion.relax.resize_kernel import MirrorPad2d, PixelTable, Resize2d, Slice2d, resize_kernel
from fusion.relax.row_kernels import RowWork, row_kernel
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import TEMPLATE_ATTRIBUTE
from schedules.contract.template import Config, Signature, Template
from schedules.kernels.pool_kernel import average_of_sums
from schedules.kernels.template_table import template_for

# Names of the kernels in a profile of the library.
_PIXEL_TABLES = {Resize2d: "resize", MirrorPad2d: "mirror_pad", Slice2d: "slice"}


@dataclass(frozen=True, eq=False)
class SummedKernel:
    """``kernel`` with two results, the second of ``sums_shape``, and the kernel that computes an ``average`` from the
    second.
    """

    kernel: relax.GlobalVar
    sums_shape: tuple[int, ...]
    average: relax.GlobalVar


class KernelLibrary:
    """Functions of one module under construction, added to it through ``builder``.

    ``as_s_tir``: each function is wrapped in a block, because some passes of TVM (``RewriteDataflowReshape``) take only
    such functions.
    """

    def __init__(
        self, builder: relax.BlockBuilder, cpu: CpuTarget, configs: Mapping[Operator, Config], as_s_tir: bool = False
    ) -> None:
        self._builder = builder
        self._cpu = cpu
        self._configs = configs
        self._as_s_tir = as_s_tir
        self._functions: dict[Any, relax.GlobalVar] = {}
        self._summed: dict[Any, tuple[relax.GlobalVar, tuple[int, int, int, int]]] = {}
        self._constants: dict[Any, relax.Expr] = {}

    def signature(self, group: Group) -> Signature:
        return self._template(group.operator).signature(group.operator, self._cpu)

    def kernel(self, group: Group) -> relax.GlobalVar:
        """Return the kernel of a group; groups with identical operator and configuration share one."""
        operator = group.operator
        config = self._configs[operator]
        key = (operator, frozenset(config.items()))
        if key not in self._functions:
            template = self._template(operator)
            name = f"{template.family.replace('-', '_')}_{_size(operator)}"
            self._functions[key] = self._add(name, template.build(operator, config, self._cpu), template.family)
        return self._functions[key]

    def summed(self, group: Group, pool: Pool2d) -> SummedKernel | None:
        """Return the kernel of ``group`` that also writes sums for the global average ``pool``; None if there is no
        such kernel.
        """
        operator = group.operator
        config = self._configs[operator]
        key = ("summed", operator, frozenset(config.items()))
        if key not in self._summed:
            template = self._template(operator)
            built = template.build_summed(operator, config, self._cpu)
            if built is None:
                return None
            name = f"{template.family.replace('-', '_')}_summed_{_size(operator)}"
            self._summed[key] = self._add(name, built.function, template.family), built.sums_shape
        kernel, shape = self._summed[key]
        last = ("average_of_sums", pool, shape)
        if last not in self._functions:
            function = average_of_sums(pool, shape[2], self._cpu)
            self._functions[last] = self._add("average_of_sums", function, "pool2d")
        return SummedKernel(kernel, shape, self._functions[last])

    def conversion(
        self, shape: tuple[int, int, int, int], blocked: bool, source: str = "float32", target: str = "float32"
    ) -> relax.GlobalVar:
        """Return the kernel that converts a tensor of NCHW ``shape`` to the blocked or the plain layout, and from dtype
        ``source`` to ``target``.
        """
        key = (shape, blocked, source, target)
        if key not in self._functions:
            make = to_blocked if blocked else to_plain
            function = make(shape, self._cpu.lanes, source, target)
            self._functions[key] = self._add(make.__name__, function, "layout")
        return self._functions[key]

    def rows(self, shape: tuple[int, int, int, int], blocked: bool, source: str = "float32") -> relax.GlobalVar:
        """Return the kernel that converts pixel rows of an image of NCHW ``shape`` to the blocked layout, or back to
        float32 rows; ``source``: dtype of the input.
        """
        key = ("rows", shape, blocked, source)
        if key not in self._functions:
            make = rows_to_blocked if blocked else blocked_to_rows
            self._functions[key] = self._add(make.__name__, make(shape, self._cpu.lanes, source), "layout")
        return self._functions[key]

    def channel_move(
        self, shapes: Sequence[tuple[int, ...]], move: ChannelMove, dtype: str = "float32"
    ) -> relax.GlobalVar:
        """Return the kernel of ``move`` between blocked tensors of ``dtype``; ``shapes``: NCHW shapes of
        its sources.
        """
        key = ("channel_move", *shapes, move.phases.shape, move.phases.tobytes(), dtype)
        if key not in self._functions:
            function = channel_move(shapes, move.phases, self._cpu.lanes, dtype)
            self._functions[key] = self._add("channel_move", function, "layout")
        return self._functions[key]

    def row_kernel(self, work: RowWork) -> relax.GlobalVar:
        """Return the kernel of ``work`` along the rows of plain tensors."""
        if work not in self._functions:
            function = row_kernel(work, self._cpu)
            self._functions[work] = self._add(str(function.attrs["global_symbol"]), function, "rows")
        return self._functions[work]

    def group_norm(self, norm: GroupNorm2d, dtype: str = "float32") -> tuple[relax.GlobalVar, relax.GlobalVar]:
        """Return the two kernels of ``norm`` on blocked tensors of ``dtype``: for the statistics, and for the
        normalisation.
        """
        found = []
        for make in (channel_statistics, group_norm):
            key = (make.__name__, norm, dtype)
            if key not in self._functions:
                self._functions[key] = self._add(make.__name__, make(norm, self._cpu, dtype), "layout")
            found.append(self._functions[key])
        return found[0], found[1]

    def statistics_shape(self, norm: GroupNorm2d) -> tuple[int, ...]:
        """Return the shape of the result of the statistics kernel of ``norm``."""
        return statistics_shape(norm, self._cpu)

    def resize(self, resize: PixelTable, dtype: str = "float32") -> relax.GlobalVar:
        """Return the kernel of ``resize`` on blocked tensors of ``dtype``."""
        key = (resize, dtype)
        if key not in self._functions:
            name = _PIXEL_TABLES[type(resize)]
            self._functions[key] = self._add(name, resize_kernel(resize, self._cpu, dtype), "layout")
        return self._functions[key]

    def byte_step(self, step: ByteStep, count: int = 0) -> relax.GlobalVar:
        """Return the kernel of ``step``; element-wise steps take ``count`` bytes."""
        kind = step.kind if isinstance(step, BytePair) and not step.per_channel else ""
        key = (type(step), kind, count) if count else step
        if key not in self._functions:
            if isinstance(step, ByteTable):
                function = table_kernel(count, self._cpu) if count else channel_table_kernel(step, self._cpu)
            elif isinstance(step, ByteMean):
                function = mean_kernel(step, self._cpu)
            elif isinstance(step, ByteWindow):
                function = window_kernel(step, self._cpu)
            elif isinstance(step, ByteResize):
                function = byte_resize_kernel(step, self._cpu)
            else:
                function = gate_kernel(step, self._cpu) if not count else pair_kernel(step.kind, count, self._cpu)
            self._functions[key] = self._add(str(function.attrs["global_symbol"]), function, "bytes")
        return self._functions[key]

    def constants(self, group: Group) -> list[relax.Expr]:
        """Return the packed weights of a group, in the order of the kernel's arguments."""
        parameters = [parameter for node in group.nodes for parameter in node.parameters]
        packed = self._template(group.operator).pack(group.operator, parameters, self._cpu)
        return [self.constant(array) for array in packed]

    def constant(self, array: np.ndarray) -> relax.Expr:
        """Return ``array`` as a constant; equal arrays share one."""
        array = np.ascontiguousarray(array)
        key = (array.shape, str(array.dtype), hashlib.sha256(array.tobytes()).digest())
        if key not in self._constants:
            self._constants[key] = relax.const(array)
        return self._constants[key]

    def _template(self, operator: Operator) -> Template:
        """Return the template that makes the kernel of ``operator`` in its configuration."""
        template = template_for(operator, self._cpu)
        assert template is not None, f"no template covers {operator}"
        return template.for_config(self._configs[operator])

    def _add(self, name: str, function: tirx.PrimFunc, family: str) -> relax.GlobalVar:
        if self._as_s_tir:
            function = _in_block(function)
        attributes = {"op_pattern": OPAQUE, TEMPLATE_ATTRIBUTE: family}
        # Private: the builder of the module chooses the name, and dead-code elimination may remove the function.
        return self._builder.add_func(function.without_attr("global_symbol").with_attr(attributes), name)


def is_covered(operator: Operator, cpu: CpuTarget) -> bool:
    """True if a template computes ``operator``."""
    return template_for(operator, cpu) is not None


def _in_block(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function as S-TIR: its body in a root block without annotations."""
    block = s_tir.SBlock([], [], [], "root", function.body)
    return function.with_body(s_tir.SBlockRealize([], True, block)).with_attr("s_tir", True)


def _size(operator: Operator) -> str:
    """Return input and output sizes as a name, so that a profile identifies the layer."""
    sizes: Sequence[tuple[int, ...]] = (operator.input_shape[1:], operator.output_shape[1:])
    if isinstance(operator, Conv2d):
        return "_".join(["x".join(map(str, size)) for size in sizes] + [f"k{operator.kernel[0]}"])
    return "_".join("x".join(map(str, size)) for size in sizes)
