"""Canonical Relax: one form for everything that a kernel of ours may compute.

Modules from ONNX (:func:`fusion.relax.import_onnx`) and from ``torch.export`` reach the same form. In it

- convolutions are ``R.nn.conv2d(x, const)`` in NCHW x OIHW; their padding (top, left, bottom, right) includes pads that
  stood before them; a bias is ``R.add(conv, const)`` directly after, of shape (1, C, 1, 1);
- dense layers are ``R.matmul(x, const)``, the weight (in, out), already transposed; a bias is ``R.add(matmul, const)``
  of shape (out,);
- the variable operand of ``R.add`` and ``R.multiply`` stands left of a constant one; ``x - const`` is an addition;
- batch norms, constant scales and shifts are folded into the convolution or product before them when nothing else reads
  its result; otherwise a batch norm is ``R.multiply`` then ``R.add`` with constants of shape (1, C, 1, 1);
- activations of ``x``:
  relu ``R.nn.relu(x)``; relu6 ``R.clip(x, 0, 6)``; sigmoid ``R.sigmoid(x)``; silu ``R.nn.silu(x)``;
  hard_sigmoid ``h = R.multiply(R.clip(R.add(x, 3), 0, 6), 1/6)``, each step a binding of its own and the constants
  scalars; hard_swish ``R.multiply(x, h)`` (``x`` on the left); hard sigmoids of another slope stay generic;
- global average pooling is ``R.mean(x, axis=[2, 3], keepdims=True)``; a model that drops the dimensions does so with a
  reshape after it; other pools are ``R.nn.max_pool2d`` and ``R.nn.avg_pool2d``, their padding includes pads before them
  and what ``ceil_mode`` adds;
- flatten, squeeze and expand_dims are ``R.reshape`` to a static shape; dropout, identities and casts that do nothing
  are gone; constant sub-graphs are constants.

Variables keep their names (from ONNX: the name of the node; ``_bias`` is appended for the bias of one node).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tvm
from tvm import relax
from tvm.relax import PyExprMutator

from fusion.relax import rules_activation, rules_affine, rules_constant, rules_shape, rules_window
from fusion.relax.rewriter import Rule, rewrite

RuleTable: TypeAlias = dict[str, tuple[Rule, ...]]


def canonicalize(mod: tvm.IRModule) -> tvm.IRModule:
    """``mod`` in canonical form: shorthand for ``Canonicalize()(mod)``."""
    transform: tvm.transform.Pass = Canonicalize()
    return transform(mod)


def merge(tables: Sequence[RuleTable]) -> RuleTable:
    """Rules per operator, earlier tables first."""
    merged: RuleTable = {}
    for table in tables:
        for operator, rules in table.items():
            merged[operator] = merged.get(operator, ()) + tuple(rules)
    return merged


RULES = merge([module.RULES for module in (rules_constant, rules_shape, rules_window, rules_activation, rules_affine)])


@tvm.transform.module_pass(opt_level=0, name="Canonicalize")
class Canonicalize:
    """Ordinary module pass: every Relax function in the canonical form of this file.

    Parameters must be bound as constants first (``relax.transform.BindParams``); what stays variable is left as it is.
    """

    def transform_module(self, mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        names = {variable: _variable_names(function) for variable, function in _relax_functions(mod).items()}
        prepare = tvm.transform.Sequential([relax.transform.Normalize(), relax.transform.ConvertToDataflow(min_size=1)])
        clean = tvm.transform.Sequential(
            [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
        )
        mod = clean(_rewrite_all(prepare(mod)))
        # Constants that only TVM can evaluate may complete a pattern.
        mod = clean(_rewrite_all(relax.transform.FoldConstant()(mod)))
        return _rename_all(mod, names)


def _relax_functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, relax.Function]:
    return {variable: function for variable, function in mod.functions.items() if isinstance(function, relax.Function)}


def _rewrite_all(mod: tvm.IRModule) -> tvm.IRModule:
    rewritten = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    for variable, function in _relax_functions(mod).items():
        rewritten.update_func(variable, rewrite(function, mod, RULES))
    return rewritten


def _rename_all(mod: tvm.IRModule, names: dict[tvm.ir.GlobalVar, frozenset[str]]) -> tvm.IRModule:
    renamed = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    for variable, function in _relax_functions(mod).items():
        renamed.update_func(variable, _Renamer(mod, function, names.get(variable, frozenset())).visit_expr(function))
    return renamed


def _variable_names(function: relax.Function) -> frozenset[str]:
    return frozenset(binding.var.name for block in function.body.blocks for binding in block.bindings)


@relax.expr_functor.mutator
class _Renamer(PyExprMutator):
    """Gives a variable back the name of the one it replaced: the builder numbers names that a dead one still holds."""

    def __init__(self, mod: tvm.IRModule, function: relax.Function, original: frozenset[str]) -> None:
        super().__init__(mod)
        self.original = original
        self.taken = set(_variable_names(function)) | {param.name for param in function.params}

    def visit_dataflow_var_def_(self, var: relax.DataflowVar) -> relax.Var:
        return self._renamed(var)

    def visit_var_def_(self, var: relax.Var) -> relax.Var:
        return self._renamed(var)

    def _renamed(self, var: relax.Var) -> relax.Var:
        stem = self._stem(var.name)
        if stem is None:
            return var
        self.taken.add(stem)
        new = type(var)(stem, var.ty)
        self.set_var_remap(var, new)
        return new

    def _stem(self, name: str) -> str | None:
        """The longest free original name that ``name`` is a numbered copy of."""
        digits = len(name) - len(name.rstrip("0123456789"))
        if name in self.original:
            return None
        stems = (name[:-count] for count in range(1, digits + 1))
        return next((stem for stem in stems if stem in self.original and stem not in self.taken), None)
