"""Local rewriting of Relax: rules look at a call and at the calls that compute its arguments, and return a simpler
form.

A rule is a pure function ``(call, graph) -> expression | None``; None: not applicable. The expression may nest calls:
they are simplified and bound in turn, a call that occurs twice in it only once. Producers that lose their last user are
left for dead-code elimination.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import PyExprMutator

from fusion.relax.bindings import constant_array

# Limit of rewrites of one call. Rules only ever make a form simpler; a longer chain is a bug in the rules.
MAX_REWRITES = 64
# Element-wise operators of one tensor, and of two.
UNARY = (
    *("relax.nn.relu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu", "relax.nn.leakyrelu"),
    *("relax.nn.softplus", "relax.clip", "relax.sigmoid", "relax.tanh", "relax.erf", "relax.exp", "relax.negative"),
    *("relax.sqrt", "relax.rsqrt", "relax.log", "relax.abs", "relax.square", "relax.sin", "relax.cos"),
)
BINARY = (
    *("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum"),
    "relax.power",
)
# Operators that rules look through, to the tensor that is viewed.
_VIEWS = frozenset({"relax.permute_dims", "relax.reshape"})


class Definitions:
    """Information for rules about the function that is being rewritten."""

    def __init__(self) -> None:
        self._values: dict[relax.Var, relax.Expr] = {}
        self._users: Counter[relax.Var] = Counter()
        self._names: dict[relax.Expr, str] = {}
        self.binding_name = ""  # name of the variable that the current call will be bound to

    def resolve(self, expr: relax.Expr) -> relax.Expr:
        """Return ``expr`` without trivial bindings in between: a variable (parameter or bound value) or a constant."""
        while isinstance(expr, relax.Var):
            value = self._values.get(expr)
            if not isinstance(value, relax.Var | tvm.ir.GenericConst):
                break
            expr = value
        return expr

    def value(self, expr: relax.Expr) -> relax.Expr:
        """Return the bound value behind a variable, or ``expr`` itself."""
        expr = self.resolve(expr)
        return self._values.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def call(self, expr: relax.Expr, *operators: str) -> relax.Call | None:
        """Return the call behind ``expr`` if it is to one of ``operators`` (such as ``relax.add``), else None."""
        value = self.value(expr)
        return value if rule_key(value) in operators else None

    def constant(self, expr: relax.Expr) -> np.ndarray | None:
        """Return the array behind ``expr`` if it is constant, else None."""
        return constant_array(self.resolve(expr))

    def is_constant(self, expr: relax.Expr) -> bool:
        """True if ``expr`` is computed from constants alone."""
        left, seen = [expr], set()
        while left:  # iterative: ``expr`` may be the result of a whole network
            value = self.value(left.pop())
            if isinstance(value, relax.Var):
                return False
            if value in seen:
                continue
            seen.add(value)
            if isinstance(value, relax.Call):
                left.extend(value.args)  # ``+=`` would use the operator of TVM's array type
            elif isinstance(value, relax.Tuple):
                left.extend(value.fields)
            elif isinstance(value, relax.TupleGetItem):
                left.append(value.tuple_value)
        return True

    def along(self, expr: relax.Expr, shape: tuple[int, ...], axis: int) -> np.ndarray | None:
        """Return a constant that varies at most along ``axis`` of a tensor of ``shape``, as a vector (``shape[axis]``,)
        in double precision; None for any other operand.
        """
        array = self.constant(expr)
        if array is None or array.ndim > len(shape):
            return None
        sizes = (1,) * (len(shape) - array.ndim) + array.shape
        if any(size != 1 for position, size in enumerate(sizes) if position != axis):
            return None
        if sizes[axis] not in (1, shape[axis]):
            return None  # one channel broadcast to several
        return np.broadcast_to(array.reshape(-1).astype(np.float64), (shape[axis],))

    def scalar(self, expr: relax.Expr) -> float | None:
        """Return the number behind ``expr`` if it is a constant with one element, or an immediate, else None."""
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            return float(expr.value)
        array = self.constant(expr)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def has_single_user(self, expr: relax.Expr) -> bool:
        """True if the value behind ``expr`` is read once, so that rewriting it repeats no work."""
        return self._users[self.resolve(expr)] == 1

    def same(self, left: relax.Expr, right: relax.Expr) -> bool:
        """True if two expressions are the same variable."""
        return self.resolve(left).same_as(self.resolve(right))

    def named_as(self, call: relax.Call, source: relax.Expr) -> relax.Call:
        """Return ``call``, to be bound under the name of the variable ``source`` that it replaces."""
        source = self.resolve(source)
        if isinstance(source, relax.Var):
            self._names[call] = source.name
        return call

    def named_here(self, call: relax.Call) -> relax.Call:
        """Return ``call``, a part of the replacement, to be bound under the name of the call that is being replaced."""
        self._names[call] = self.binding_name
        return call

    def with_bias(self, call: relax.Call, bias: relax.Expr) -> relax.Call:
        """Return ``call + bias`` as the replacement of the current call, whose name goes to ``call``."""
        total = relax.op.add(call, bias)
        self._names[call], self._names[total] = self.binding_name, f"{self.binding_name}_bias"
        return total

    def name_for(self, expr: relax.Expr, default: str) -> str:
        """Return the name to bind ``expr`` under."""
        return self._names.get(expr, default)

    def inherit_name(self, expr: relax.Expr, source: relax.Expr) -> None:
        """Give ``expr``, which replaces the call ``source`` with other arguments, the name of ``source``."""
        if source in self._names:
            self._names[expr] = self._names[source]

    def read_again(self, variable: relax.Var) -> None:
        """Count one more user of ``variable``."""
        self._users[variable] += 1

    def bind(self, variable: relax.Var, value: relax.Expr, users: int) -> None:
        """Record a binding whose variable is read ``users`` times."""
        self._values[variable] = value
        root = self.resolve(variable)
        if root is not variable and isinstance(root, relax.Var):
            self._users[root] += users - 1  # an alias: its users read the root instead of the alias
            return
        self._users[variable] = users
        # Rules look through views: each user of a view may come to read the viewed tensor.
        while users > 1 and rule_key(value) in _VIEWS:
            source = self.resolve(value.args[0])
            if not isinstance(source, relax.Var):
                return
            self._users[source] += users - 1
            value = self._values.get(source, source)


RewriteRule: TypeAlias = Callable[[relax.Expr, Definitions], relax.Expr | None]
RuleTable: TypeAlias = dict[str, tuple[RewriteRule, ...]]  # by the key of :func:`rule_key`


def rule_key(expr: object) -> str | None:
    """Return the key of the rules for an expression: ``relax.nn.conv2d`` for a call to it, ``TupleGetItem`` for a
    projection, None for anything else.
    """
    if isinstance(expr, relax.TupleGetItem):
        return "TupleGetItem"
    if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name.startswith("relax."):
        return expr.op.name
    return None


def short_name(expr: relax.Expr) -> str:
    """Return the default name of a binding: ``conv2d`` for a call to ``relax.nn.conv2d``."""
    return (rule_key(expr) or "value").rpartition(".")[2].lower()


def constant_of(array: np.ndarray) -> relax.Expr:
    """Return ``array`` as a constant of its own dtype: ``relax.const`` would convert 64 bits to 32."""
    return relax.const(np.asarray(array), str(array.dtype))


def is_float(expr: relax.Expr) -> bool:
    """True if a tensor expression holds floating-point numbers."""
    return isinstance(expr.ty, relax.TensorType) and "float" in str(expr.ty.dtype)


def rewrite(
    function: relax.Function, mod: tvm.IRModule, rules: Mapping[str, Sequence[RewriteRule]]
) -> tuple[relax.Function, bool]:
    """Apply rules until none matches; of an operator's rules the first that matches wins. Return the new function, and
    True if a rule matched.
    """
    rewriter = _Rewriter(mod, rules, _count_users(function))
    return rewriter.visit_expr(function), rewriter.fitted


def _count_users(function: relax.Function) -> Counter[relax.Var]:
    users: Counter[relax.Var] = Counter()

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Var):
            users[expr] += 1

    for value in _values(function):
        relax.analysis.post_order_visit(value, visit)
    return users


def _values(function: relax.Function) -> Iterator[relax.Expr]:
    """Yield bound values and the result. Inside a bound If, variables count once per mention, which is enough."""
    for block in function.body.blocks:
        for binding in block.bindings:
            yield binding.value
    yield function.body.body


@relax.expr_functor.mutator
class _Rewriter(PyExprMutator):
    def __init__(
        self, mod: tvm.IRModule, rules: Mapping[str, Sequence[RewriteRule]], users: Counter[relax.Var]
    ) -> None:
        super().__init__(mod)
        self.rules = rules
        self.users = users
        self.definitions = Definitions()
        self.fitted = False
        self.bound: dict[relax.Expr, relax.Var] = {}  # nested calls that are already bound, of the current binding

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        if rule_key(binding.value) is None and not isinstance(binding.value, relax.Tuple | relax.Var):
            super().visit_var_binding_(binding)
            return
        name = binding.var.name
        self.bound.clear()
        value = self._simplify(self.visit_expr(binding.value), name)
        is_output = not isinstance(binding.var, relax.DataflowVar) and self.builder_.current_block_is_dataflow()
        emit = self.builder_.emit_output if is_output else self.builder_.emit
        variable = emit(value, self.definitions.name_for(value, name))
        self.definitions.bind(variable, value, self.users[binding.var])
        self.set_var_remap(binding.var, variable)

    def _simplify(self, expr: relax.Expr, name: str) -> relax.Expr:
        """Return ``expr`` with simple arguments after all rules."""
        for _ in range(MAX_REWRITES):
            expr = self._bind_arguments(expr, name)
            self.definitions.binding_name = self.definitions.name_for(expr, name)
            simpler = self._apply(expr)
            if simpler is None:
                return expr
            expr = simpler
        raise AssertionError(f"rules do not terminate on {expr}")

    def _apply(self, expr: relax.Expr) -> relax.Expr | None:
        for rule in self.rules.get(rule_key(expr) or "", ()):
            simpler = rule(expr, self.definitions)
            if simpler is not None:
                self.fitted = True
                return simpler
        return None

    def _bind_arguments(self, expr: relax.Expr, name: str) -> relax.Expr:
        if isinstance(expr, relax.TupleGetItem):
            source = self._bind(expr.tuple_value, name)
            bound = expr if source is expr.tuple_value else relax.TupleGetItem(source, expr.index)
        elif rule_key(expr) is not None:
            args = [self._bind(arg, name) for arg in expr.args]
            changed = any(new is not old for new, old in zip(args, expr.args, strict=True))
            bound = relax.Call(expr.op, args, expr.attrs, expr.ty_args) if changed else expr
        else:
            return expr
        normal = self.builder_.normalize(bound)
        self.definitions.inherit_name(normal, expr)
        return normal

    def _bind(self, expr: relax.Expr, name: str) -> relax.Expr:
        """Return a variable for a nested call; other expressions unchanged."""
        if isinstance(expr, relax.Tuple):
            fields = [self._bind(field, name) for field in expr.fields]
            changed = any(new is not old for new, old in zip(fields, expr.fields, strict=True))
            return relax.Tuple(fields) if changed else expr
        if rule_key(expr) is None:
            return expr
        if expr in self.bound:
            self.definitions.read_again(self.bound[expr])
            return self.bound[expr]
        name = self.definitions.name_for(expr, f"{name}_{short_name(expr)}")
        value = self._simplify(expr, name)
        if rule_key(value) is None:
            return value
        variable = self.builder_.emit(value, name)
        self.definitions.bind(variable, value, 1)
        self.bound[expr] = variable
        return variable
