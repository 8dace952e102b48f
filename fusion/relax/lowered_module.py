"""Module under construction: kernels and constants, each added once, and tensors in their layouts and dtypes, whose
conversions are made on demand, each once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from tvm import relax, s_tir, tirx

from costmodel.operators.layers import Conv2d, Operator, Pool2d
from fusion.model.conv_graph import Group
from fusion.relax.bindings import OPAQUE
from fusion.relax.channel_moves import ChannelMove, channel_move
from fusion.relax.integer_calls import ByteMean, BytePair, ByteResize, ByteStep, ByteTable, ByteWindow
from fusion.relax.kernels.bytes import byte_resize_kernel as byte_resize_kernel
from fusion.relax.kernels.bytes import (
    channel_table_kernel,
    gate_kernel,
    mean_kernel,
    pair_kernel,
    table_kernel,
    window_kernel,
)
from fusion.relax.kernels.layouts import blocked_to_rows, rows_to_blocked, to_blocked, to_plain
from fusion.relax.kernels.reductions import (
    GroupNorm2d,
    RowWork,
    channel_statistics,
    group_norm,
    row_kernel,
    statistics_shape,
)
from fusion.relax.kernels.resize import MirrorPad2d, PixelTable, Resize2d, Slice2d, resize_kernel
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import TEMPLATE_ATTRIBUTE
from schedules.contract.template import Config, Signature, Template, blocked_shape
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


Layout = Literal["plain", "blocked"]


class Form(NamedTuple):
    """Layout and dtype of a tensor in memory."""

    layout: Layout
    dtype: str


class LaidOutValue:
    """One tensor of the original function, where it has ``shape`` and ``dtype``.

    ``forms``: the expressions of the tensor in the function under construction. Either one of them has the tensor's own
    ``dtype``, or the tensor was computed in a shorter dtype and has no more digits than that.
    """

    def __init__(self, shape: tuple[int, ...], layout: Layout, expression: relax.Expr, dtype: str = "float32") -> None:
        """Start with one form: ``expression`` in ``layout``."""
        self.shape = shape
        self.dtype = dtype
        self.forms = {Form(layout, str(expression.ty.dtype)): expression}

    def stored(self, layout: Layout) -> str | None:
        """Return the dtype in which the tensor exists in ``layout``, the first of several; None if it does
        not exist.
        """
        return next((form.dtype for form in self.forms if form.layout == layout), None)

    @property
    def is_blocked(self) -> bool:
        """True if the tensor exists in the blocked layout."""
        return self.stored("blocked") is not None

    @property
    def is_plain(self) -> bool:
        """True if the tensor exists in its own shape."""
        return self.stored("plain") is not None


@dataclass(frozen=True, eq=False)
class Layouts:
    """Emitter of conversions through ``emit(expression, name) -> variable``, which is public."""

    emit: Callable[[relax.Expr, str], relax.Var]
    library: KernelLibrary
    lanes: int

    def plain(self, value: LaidOutValue, dtype: str | None = None) -> relax.Expr:
        """Return the tensor in its own shape, in ``dtype`` (default: its dtype in the original function)."""
        return self._in_form(value, Form("plain", dtype or value.dtype))

    def blocked(self, value: LaidOutValue, dtype: str | None = None) -> relax.Expr:
        """Return the tensor (of rank four) in the blocked layout, in ``dtype`` (default: its dtype in the original
        function).
        """
        return self._in_form(value, Form("blocked", dtype or value.dtype))

    def reshape(self, tensor: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        """Return a view of ``tensor``; nothing is copied."""
        return self.emit(relax.op.reshape(tensor, shape), "view")

    def cast(self, tensor: relax.Expr, dtype: str) -> relax.Expr:
        """Return ``tensor`` in ``dtype``: an element-wise operator, which TVM fuses with the operators before or after
        it unless those are template kernels.
        """
        if str(tensor.ty.dtype) == dtype:
            return tensor
        return self.emit(relax.op.astype(tensor, dtype), f"as_{dtype}")

    def _in_form(self, value: LaidOutValue, wanted: Form) -> relax.Expr:
        if wanted not in value.forms:
            value.forms[wanted] = self._converted(value, _source(value, wanted), wanted)
        return value.forms[wanted]

    def _converted(self, value: LaidOutValue, source: Form, wanted: Form) -> relax.Expr:
        tensor = value.forms[source]
        if source.layout == wanted.layout:
            return self.cast(tensor, wanted.dtype)
        shape = value.shape if wanted.layout == "plain" else blocked_shape(value.shape, self.lanes)
        if self._same_bytes(value.shape):
            return self.cast(self.reshape(tensor, shape), wanted.dtype)
        batch, channels, height, width = value.shape
        image = (batch, channels, height, width)
        kernel = self.library.conversion(image, wanted.layout == "blocked", source.dtype, wanted.dtype)
        call = relax.call_tir(kernel, [tensor], out_ty=relax.TensorType(shape, wanted.dtype))
        return self.emit(call, wanted.layout)

    def _same_bytes(self, shape: tuple[int, ...]) -> bool:
        """True if the tensor has the same bytes in both layouts: one pixel of whole channel blocks."""
        return shape[2] * shape[3] == 1 and shape[1] % self.lanes == 0


def _source(value: LaidOutValue, wanted: Form) -> Form:
    """Return the best source of ``wanted``: preferably of the same dtype, then of the original dtype, then in the same
    layout.
    """
    return min(
        value.forms,
        key=lambda form: (form.dtype != wanted.dtype, form.dtype != value.dtype, form.layout != wanted.layout),
    )
