"""Lowering of the groups of a plan to calls of template kernels, with a layout and a dtype for every tensor in between.

A tensor may exist plain and blocked, and in the dtypes that its readers need; a kernel requests those of its signature,
and a conversion is emitted if the tensor does not exist in that form yet: none is needed between two template kernels
of one dtype. Inputs, outputs and operators without a template kernel keep the dtypes of the module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import tvm
from tvm import relax
from tvm.relax import PyExprMutator

from costmodel.operators.layers import Conv2d, Operator, Pool2d
from fusion.model.conv_graph import FusionPlan, Group, Node
from fusion.relax.bindings import operator_name, read_program, static_shape, variables
from fusion.relax.channel_moves import ChannelMoves
from fusion.relax.lowered_module import Form, KernelLibrary, LaidOutValue, Layouts, SummedKernel, is_covered
from fusion.relax.untuned_operators import BlockedOperators, ByteOperators, RowOperators
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, TensorSpec

# Operators that only change the shape of a tensor.
_VIEWS = frozenset({"relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims"})


def lower(
    mod: tvm.IRModule,
    plan: FusionPlan,
    configs: Mapping[Operator, Config],
    cpu: CpuTarget,
    function: str = "main",
    groups_only: bool = False,
) -> tvm.IRModule:
    """Return a new module: ``mod`` with the groups of ``plan`` replaced by calls of template kernels.

    ``plan`` must come from the graph of this very module. Nodes in no group, and groups that no template covers, stay
    unchanged; ``KeyError`` for a covered operator without an entry in ``configs``. Other element-wise operators run on
    blocked tensors if their operands are blocked. ``groups_only`` leaves the rest of the module untouched and makes
    kernels for any pipeline of TVM, not only :func:`fusion.relax.machine_code.build_executable`.
    """
    groups = [group for group in plan.groups if is_covered(group.operator, cpu)]
    rewriter = _Lowering(mod, function, groups, configs, cpu, groups_only)
    lowered = rewriter.run()
    # Removes conversions of tensors without a plain reader, and constants and kernels that lost their users.
    return relax.transform.DeadCodeElimination([function])(lowered)


@relax.expr_functor.mutator
class _Lowering(PyExprMutator):
    def __init__(
        self,
        mod: tvm.IRModule,
        function: str,
        groups: list[Group],
        configs: Mapping[Operator, Config],
        cpu: CpuTarget,
        groups_only: bool,
    ) -> None:
        super().__init__(mod)
        self.function = function
        self.module = mod
        self.program = read_program(mod[function])
        self.group_of = {group.nodes[-1].output: group for group in groups}
        self.averages = {} if groups_only else _averages(groups)
        self.skipped = {var for group in groups for node in group.nodes for var in node.covered} - set(self.group_of)
        self.values: dict[relax.Var, LaidOutValue] = {}
        self.averaged: dict[relax.Var, LaidOutValue] = {}  # global averages that are already computed
        self.library = KernelLibrary(self.builder_, cpu, configs, as_s_tir=groups_only)
        self.layouts = Layouts(self.builder_.emit, self.library, cpu.lanes)
        moves = ChannelMoves(self.program)
        constant, bound = self.program.constant, self.program.value
        blocked = BlockedOperators(
            self.layouts, self.library, self.value_of, constant, moves, bound, self._feeds_kernel
        )  # fmt: skip
        self.blocked_operators = None if groups_only else blocked
        rows = RowOperators(self.layouts, self.library, self.value_of, constant, bound)
        self.row_operators = None if groups_only else rows
        steps = ByteOperators(mod, self.layouts, self.library, self.value_of, constant)
        self.byte_operators = None if groups_only else steps

    def run(self) -> tvm.IRModule:
        """Return the rewritten module."""
        function = self.module[self.function]
        self.builder_.update_func(self.module.get_global_var(self.function), self.visit_expr(function))
        return self.builder_.get()

    # --- interface of the other parts -------------------------------------------------------------

    def value_of(self, var: relax.Var) -> LaidOutValue | None:
        """Return the tensor of an original variable in its layouts; None if it is not a tensor of static shape."""
        if var not in self.values:
            shape = static_shape(var)
            if shape is None:
                return None
            self.values[var] = LaidOutValue(shape, "plain", super().visit_expr(var), str(var.ty.dtype))
        return self.values[var]

    def _feeds_kernel(self, var: relax.Var) -> bool:
        """True if a group reads ``var``."""
        readers = (self.program.bindings[user].var for user in self.program.users.get(var, ()) if user >= 0)
        return any(reader in self.skipped or reader in self.group_of for reader in readers)

    # --- visiting ---------------------------------------------------------------------------------

    def visit_var_(self, op: relax.Var) -> relax.Expr:
        return self._plain_use(op)

    def visit_dataflow_var_(self, op: relax.DataflowVar) -> relax.Expr:
        return self._plain_use(op)

    def _plain_use(self, var: relax.Var) -> relax.Expr:
        return self.layouts.plain(self.values[var]) if var in self.values else super().visit_var_(var)

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        result = super().visit_dataflow_block_(block)
        # Conversions inside a dataflow block are not visible after it; the outputs of the block are plain.
        self.values.clear()
        return result

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if binding.var in self.skipped:
            return
        if binding.var in self.averaged:
            self._define(binding.var, self.averaged.pop(binding.var))
            return
        if binding.var in self.group_of:
            self._define(binding.var, self._kernel_call(self.group_of[binding.var]))
            return
        if isinstance(binding.var, relax.DataflowVar) and isinstance(binding.value, relax.Var):
            value = self.value_of(binding.value)
            if value is not None:
                self.values[binding.var] = value
                return
        if self.byte_operators is not None:
            step = self.byte_operators.rewrite(binding)
            if step is not None:
                self._define(binding.var, step)
                return
        if self.blocked_operators is not None:
            call = self.blocked_operators.rewrite(binding)
            if call is not None:
                shape = static_shape(binding.var)
                assert shape is not None
                blocked = self.builder_.emit(call, binding.var.name)
                self._define(binding.var, LaidOutValue(shape, "blocked", blocked, str(binding.var.ty.dtype)))
                return
        if self.row_operators is not None:
            call = self.row_operators.rewrite(binding)
            if call is not None:
                shape = static_shape(binding.var)
                assert shape is not None
                plain = self.layouts.reshape(self.builder_.emit(call, binding.var.name), shape)
                self._define(binding.var, LaidOutValue(shape, "plain", plain))
                return
        view = self._view(binding)
        if view is not None:
            self._define(binding.var, view)
            return
        if isinstance(binding.value, relax.If | relax.Function):
            # A conversion emitted inside a branch would not be visible after it.
            for var in variables(binding.value):
                self._plain_use(var)
        super().visit_var_binding_(binding)

    def _view(self, binding: relax.VarBinding) -> LaidOutValue | None:
        """Return a reshaped tensor that is stored in a shorter dtype, kept in that dtype; None for any
        other binding.
        """
        call, shape = binding.value, static_shape(binding.var)
        if operator_name(call) not in _VIEWS or shape is None or not isinstance(call.args[0], relax.Var):
            return None
        value = self.value_of(call.args[0])
        stored = None if value is None else value.stored("plain") or value.stored("blocked")
        if value is None or stored is None or stored == value.dtype:
            return None
        return LaidOutValue(shape, "plain", self.layouts.reshape(self.layouts.plain(value, stored), shape), value.dtype)

    def _define(self, var: relax.Var, value: LaidOutValue) -> None:
        """Bind ``var`` of the original to ``value``; an output of a dataflow block is made plain."""
        self.values[var] = value
        if isinstance(var, relax.DataflowVar):
            return
        plain = self.layouts.plain(value)
        if self.builder_.current_block_is_dataflow():
            plain = self.builder_.emit_output(plain, var.name)
        value.forms[Form("plain", value.dtype)] = plain
        self.set_var_remap(var, plain)

    # --- kernels ----------------------------------------------------------------------------------

    def _kernel_call(self, group: Group) -> LaidOutValue:
        first, last = group.nodes[0], group.nodes[-1]
        signature = self.library.signature(group)
        arguments = [self._argument(first.data, signature.data)]
        if signature.gate is not None:
            assert first.gate is not None
            arguments.append(self._argument(first.gate, signature.gate))
        arguments += self.library.constants(group)
        if signature.residual is not None:
            assert last.residual is not None
            arguments.append(self._argument(last.residual, signature.residual))
        out_ty = relax.TensorType(signature.output.shape, signature.output.dtype)
        average = self.averages.get(last.output)
        pool = None if average is None else average.operator
        # Computed from sums in float32 and stored in float32: it is small.
        summed = self.library.summed(group, replace(pool, dtype="float32")) if isinstance(pool, Pool2d) else None
        if average is None or summed is None:
            result = self.builder_.emit(
                relax.call_tir(self.library.kernel(group), arguments, out_ty=out_ty), last.output.name
            )
        else:
            result = self._summed_call(summed, arguments, out_ty, last.output, average.nodes[0])
        shape = static_shape(last.output)
        assert shape is not None
        if signature.output.layout == "plain" and shape != signature.output.shape:
            result = self.layouts.reshape(result, shape)
        return LaidOutValue(shape, signature.output.layout, result, str(last.output.ty.dtype))

    def _summed_call(
        self,
        summed: SummedKernel,
        arguments: list[relax.Expr],
        out_ty: relax.TensorType,
        output: relax.Var,
        pool: Node,
    ) -> relax.Var:
        """Return the result of a kernel that also writes sums; emits the kernel that computes the average of ``pool``
        from them.
        """
        both = relax.call_tir(summed.kernel, arguments, out_ty=[out_ty, relax.TensorType(summed.sums_shape, "float32")])
        pair = self.builder_.emit(both, f"{output.name}_and_sums")
        result = self.builder_.emit(relax.TupleGetItem(pair, 0), output.name)
        sums = self.builder_.emit(relax.TupleGetItem(pair, 1), f"{output.name}_sums")
        shape = pool.operator.output_shape
        average = relax.call_tir(summed.average, [sums], out_ty=relax.TensorType(shape, "float32"))
        value, own = self.builder_.emit(average, pool.output.name), static_shape(pool.output)
        assert own is not None
        plain = value if own == shape else self.layouts.reshape(value, own)
        self.averaged[pool.output] = LaidOutValue(own, "plain", plain)
        return result

    def _argument(self, var: relax.Var, spec: TensorSpec) -> relax.Expr:
        value = self.value_of(var)
        assert value is not None
        if spec.layout == "blocked":
            return self.layouts.blocked(value, spec.dtype)
        plain = self.layouts.plain(value, spec.dtype)
        return plain if value.shape == spec.shape else self.layouts.reshape(plain, spec.shape)


def _averages(groups: Sequence[Group]) -> dict[relax.Var, Group]:
    """Return for each output of an unfused convolution its global average, if that is in the same block."""
    writers = {group.nodes[-1].output: group for group in groups if not group.is_fused}
    found: dict[relax.Var, Group] = {}
    for group in groups:
        pool, writer = group.nodes[0], writers.get(group.nodes[0].data)
        if writer is None or not isinstance(pool.operator, Pool2d) or pool.operator.kind != "average":
            continue
        if pool.operator.is_global and isinstance(writer.operator, Conv2d) and pool.block == writer.nodes[0].block:
            found.setdefault(pool.data, group)
    return found
