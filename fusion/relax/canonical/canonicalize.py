"""Canonical form of Relax modules: one form for all operators that a template kernel may compute.

Modules from ONNX (:func:`fusion.relax.import_onnx`) and from ``torch.export`` reach the same form, in which

- convolutions are ``R.nn.conv2d(x, const)`` in NCHW x OIHW; their padding (top, left, bottom, right) includes pads
  before them; a bias is ``R.add(conv, const)`` directly after, of shape (1, C, 1, 1);
- dense layers are ``R.matmul(x, const)``, the weight (in, out), already transposed; a bias is ``R.add(matmul, const)``
  of shape (out,);
- the variable operand of ``R.add`` and ``R.multiply`` is left of a constant one; ``x - const`` is an addition;
- batch norms, constant scales and shifts are folded into the convolution or product before them if nothing else reads
  its result, else into the one after them (only scales before a convolution with padding, whose zeros stay zeros);
  otherwise a batch norm is ``R.multiply`` then ``R.add`` with constants of shape (1, C, 1, 1);
- convolutions of one tensor that are summed, and a batch norm of that tensor in the sum, are one convolution; a gate
  with a bypass, ``x + x g``, is ``R.multiply(x, R.add(g, 1))``;
- convolutions of the parts of a split that are concatenated again are the groups of one, mixed depthwise windows become
  the largest of them; convolutions of one tensor with one window are one; other concatenations of convolutions have
  scales, shifts and activations in their parts;
- activations of ``x`` (others are recognised by their values, :mod:`fusion.relax.epilogue`, and need no rule):
  relu ``R.nn.relu(x)``; relu6 ``R.clip(x, 0, 6)``; sigmoid ``R.sigmoid(x)``; silu ``R.nn.silu(x)``;
  gelu ``R.nn.gelu(x)``, its approximation by tanh ``R.nn.gelu_tanh(x)``;
  hard_sigmoid ``h = R.multiply(R.clip(R.add(x, 3), 0, 6), 1/6)``, each step a binding of its own and the constants
  scalars; hard_swish ``R.multiply(x, h)`` (``x`` on the left); hard sigmoids of another slope stay generic;
- layer norms are ``R.nn.layer_norm`` with their scale and shift, also if an exporter wrote them as single operators;
  instance norms and group norms are ``R.nn.group_norm`` of images, also if an exporter wrote them as rows of groups;
- convolutions and pools of one dimension are those of images of one row, between views;
- images that an exporter holds channels-last are NCHW again, as far as element-wise operators, layer norms, products
  of the channels, pads, slices, concatenations and reductions reach: layer norms are ``R.nn.layer_norm`` along axis 1,
  products 1x1 convolutions; an input is brought to NCHW before it is padded or scaled;
- a stack along a new axis that is summed along it is ``R.add`` of the parts;
- convolutions with computed weights are ``R.matmul`` with the pixels that their windows read;
- convolutions along one axis or three and pools along one are those of images, seen as ``R.reshape`` (sequences, and
  volumes whose rows are frames) or ``R.permute_dims(R.reshape)`` (frames after channels); subsequent operators per
  channel or per value come before that;
- transposed convolutions are ``R.nn.conv2d`` whose channels hold the phases of the stride (of several, one for each
  phase, ``R.concat``), then depth-to-space: ``R.reshape``, ``R.permute_dims``, ``R.reshape``; subsequent operators per
  channel or per value come before that;
- global average pooling is ``R.mean(x, axis=[2, 3], keepdims=True)``; a model that drops the dimensions does so with a
  reshape after it; other pools are ``R.nn.max_pool2d`` and ``R.nn.avg_pool2d``, their padding includes pads before them
  and what ``ceil_mode`` adds;
- flatten, squeeze and expand_dims are ``R.reshape`` to a static shape; dropout, identities and casts without effect
  are removed; constant sub-graphs are constants.

Variables keep their names (from ONNX: the name of the node; ``_bias`` is appended for the bias of one node).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import tvm
from tvm import relax, tirx
from tvm.relax import PyExprMutator

from fusion.relax.bindings import variables
from fusion.relax.canonical.affine import AFFINE_RULES, PRECEDING_RULES
from fusion.relax.canonical.branches import BRANCH_RULES, PARALLEL_RULES, STACK_RULES
from fusion.relax.canonical.composites import ACTIVATION_RULES, NORM_RULES
from fusion.relax.canonical.ranks import RANK_RULES
from fusion.relax.canonical.rewriter import RuleTable, rewrite, rule_key
from fusion.relax.canonical.views import CHANNELS_LAST_RULES, CONSTANT_RULES, SHAPE_RULES
from fusion.relax.canonical.windows import COMPUTED_WEIGHT_RULES, TRANSPOSED_RULES, WINDOW_RULES

Naming: TypeAlias = Callable[[str], str]
# Suffix of every name while rules work. The builder numbers a name that a dead variable still holds: a copy of
# ``Conv_1`` would be ``Conv_11``, which may be the name of another variable.
_MARK = "__itself"


def canonicalize(mod: tvm.IRModule) -> tvm.IRModule:
    """Return ``mod`` in canonical form: shorthand for ``Canonicalize()(mod)``."""
    transform: tvm.transform.Pass = Canonicalize()
    return transform(mod)


def merge(tables: Sequence[RuleTable]) -> RuleTable:
    """Merge tables of rules per operator; rules of earlier tables come first."""
    merged: RuleTable = {}
    for table in tables:
        for operator, rules in table.items():
            merged[operator] = merged.get(operator, ()) + tuple(rules)
    return merged


RULES = merge(
    [
        CONSTANT_RULES,
        SHAPE_RULES,
        TRANSPOSED_RULES,
        WINDOW_RULES,
        ACTIVATION_RULES,
        AFFINE_RULES,
        PRECEDING_RULES,
        BRANCH_RULES,
        PARALLEL_RULES,
        NORM_RULES,
        CHANNELS_LAST_RULES,
        RANK_RULES,
        STACK_RULES,
        COMPUTED_WEIGHT_RULES,
    ]
)


@tvm.transform.module_pass(opt_level=0, name="Canonicalize")
class Canonicalize:
    """Module pass that brings every Relax function to the canonical form of this file.

    Parameters must be bound as constants first (``relax.transform.BindParams``); variable operands are left unchanged.
    """

    def transform_module(self, mod: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        names = {variable: frozenset(_variable_names(body)) for variable, body in _relax_functions(mod).items()}
        mod = _renamed(mod, dict.fromkeys(names, _mark))
        prepare = tvm.transform.Sequential([relax.transform.Normalize(), relax.transform.ConvertToDataflow(min_size=1)])
        clean = tvm.transform.Sequential(
            [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
        )
        mod, simpler = _rewrite_all(prepare(mod))
        mod = clean(mod)
        # Constants that only TVM can evaluate, and users that were removed, may complete a pattern.
        folded = _folded(mod)
        if simpler or folded is not mod:
            mod = clean(_rewrite_all(folded)[0])
        functions = _relax_functions(mod)
        return _renamed(mod, {variable: _Unmarked(functions[variable], names[variable]) for variable in names})


def _relax_functions(mod: tvm.IRModule) -> dict[tvm.ir.GlobalVar, relax.Function]:
    return {variable: function for variable, function in mod.functions.items() if isinstance(function, relax.Function)}


def _rewrite_all(mod: tvm.IRModule) -> tuple[tvm.IRModule, bool]:
    """Apply all rules; return the new module, and True if one of them matched."""
    simpler = False
    rewritten = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    for variable, function in _relax_functions(mod).items():
        result, fitted = rewrite(function, mod, RULES)
        simpler = simpler or fitted
        rewritten.update_func(variable, result)
    return rewritten, simpler


def _folded(mod: tvm.IRModule) -> tvm.IRModule:
    """Return ``mod`` with constant sub-graphs evaluated, or ``mod`` itself if there are none.

    TVM's pass lowers every call that it meets to see if it can be evaluated, so it is given only the constant ones.
    """
    folded = mod
    for variable, function in _relax_functions(mod).items():
        constant = _constant_bindings(function)
        if not constant:
            continue
        results = relax.Tuple([binding.var for binding in constant])
        body = relax.SeqExpr([relax.DataflowBlock(constant)], results)
        alone = tvm.IRModule({"main": relax.Function([], body, relax.TupleType([var.ty for var in results.fields]))})
        evaluated = relax.transform.FoldConstant()(alone)["main"].body
        left = {binding.var: binding.value for block in evaluated.blocks for binding in block.bindings}
        values = [left.get(field, field) for field in evaluated.body.fields]
        known = {each.var: value for each, value in zip(constant, values, strict=True) if not variables(value)}
        if folded is mod:
            folded = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
        folded.update_func(variable, _with_values(function, known))
    return folded


def _constant_bindings(function: relax.Function) -> list[relax.VarBinding]:
    """Return the dataflow bindings that read only each other, constants and shapes."""
    found: dict[relax.Var, relax.VarBinding] = {}
    for block in function.body.blocks:
        for binding in block.bindings if isinstance(block, relax.DataflowBlock) else ():
            value = _known_shape(binding.value)
            known = rule_key(value) or isinstance(value, tvm.ir.GenericConst | relax.ShapeExpr | relax.Tuple)
            if known and all(read in found for read in variables(value)):
                found[binding.var] = relax.VarBinding(binding.var, value)
    return list(found.values()) if any(rule_key(binding.value) for binding in found.values()) else []


def _known_shape(value: relax.Expr) -> relax.Expr:
    """Return the shape in place of a ``shape_of`` call without unknown sizes; other values unchanged."""
    if rule_key(value) != "relax.shape_of":
        return value
    shape = value.args[0].ty.shape
    known = isinstance(shape, relax.ShapeExpr) and all(isinstance(size, tirx.IntImm) for size in shape.values)
    return shape if known else value


def _with_values(function: relax.Function, values: Mapping[relax.Var, relax.Expr]) -> relax.Function:
    """Return ``function`` with the values of some variables replaced."""
    blocks = []
    for block in function.body.blocks:
        bindings = [
            relax.VarBinding(binding.var, values[binding.var]) if binding.var in values else binding
            for binding in block.bindings
        ]
        blocks.append(type(block)(bindings))
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _renamed(mod: tvm.IRModule, namings: dict[tvm.ir.GlobalVar, Naming]) -> tvm.IRModule:
    renamed = tvm.IRModule(mod.functions, attrs=mod.attrs, global_infos=mod.global_infos)
    for variable, function in _relax_functions(mod).items():
        if variable in namings:
            renamed.update_func(variable, _Renamer(mod, namings[variable]).visit_expr(function))
    return renamed


def _variable_names(function: relax.Function) -> list[str]:
    return [binding.var.name for block in function.body.blocks for binding in block.bindings]


def _mark(name: str) -> str:
    return name + _MARK


class _Unmarked:
    """Mapping from marked names to original names. A numbered copy gets the name of the variable it replaced if that is
    gone.
    """

    def __init__(self, function: relax.Function, original: frozenset[str]) -> None:
        names = _variable_names(function)
        self._original = original
        self._taken = {name for name in names if _MARK not in name} | {param.name for param in function.params}
        self._present = {name.removesuffix(_MARK) for name in names if name.endswith(_MARK)}

    def __call__(self, name: str) -> str:
        if _MARK not in name:
            return name
        stem, _, rest = name.partition(_MARK)
        wanted = stem + rest.replace(_MARK, "").rstrip("0123456789")
        number, found = 1, wanted
        while not self._is_free(found, exact=not rest, own=wanted == stem):
            number += 1
            found = f"{wanted}_{number}"
        self._taken.add(found)
        return found

    def _is_free(self, name: str, exact: bool, own: bool) -> bool:
        """True if ``name`` may be used; ``exact``: for the original variable itself; ``own``: for it or
        a copy of it.
        """
        if name in self._taken:
            return False
        if name in self._original and not own:
            return False  # This name was derived from another variable's, and its original owner may still follow.
        return exact or name not in self._present


@relax.expr_functor.mutator
class _Renamer(PyExprMutator):
    """Mutator that renames every variable by ``naming``."""

    def __init__(self, mod: tvm.IRModule, naming: Naming) -> None:
        super().__init__(mod)
        self.naming = naming

    def visit_dataflow_var_def_(self, var: relax.DataflowVar) -> relax.Var:
        return self._rename(var)

    def visit_var_def_(self, var: relax.Var) -> relax.Var:
        return self._rename(var)

    def _rename(self, var: relax.Var) -> relax.Var:
        name = self.naming(var.name)
        if name == var.name:
            return var
        new = type(var)(name, var.ty)
        self.set_var_remap(var, new)
        return new
