"""Names of the layers that the kernels of a library compute, in the order in which it runs them."""

# ruff: noqa: E402

from __future__ import annotations

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import relax
from tvm.relax import op

from fusion.relax.machine_code import build_executable, kernel_layers
from tests.fusion.relax_models import CPU, module


def test_names_follow_the_calls_of_a_run_and_results_have_their_index():
    def body(net, x):
        first = net(op.nn.softmax(x), "first")
        pooled = net(op.nn.max_pool2d(first, (2, 2), (2, 2)), "pooled")
        flat = net(op.reshape(pooled, (1, 16)), "flat")
        return flat, net(op.nn.softmax(flat, axis=1), "last"), first

    compiled = build_executable(module((1, 4, 4, 4), body), CPU)
    assert compiled.layers == ("result 2", "result 0", "result 1")  # a view of a result is the result
    symbols: list[str] = []
    machine = compiled.machine()
    machine.set_instrument(lambda _, symbol, before, *__: symbols.append(symbol) if before else None)
    machine["main"](tvm.runtime.tensor(np.zeros((1, 4, 4, 4), "float32")))
    assert len([symbol for symbol in symbols if not symbol.startswith("vm.builtin.")]) == len(compiled.layers)


def test_what_the_data_decides_has_no_names():
    builder = relax.BlockBuilder()
    x, condition = relax.Var("x", relax.TensorType((4,), "float32")), relax.Var("c", relax.TensorType((), "bool"))
    with builder.function("main", [x, condition]):
        chosen = builder.emit(relax.If(condition, op.exp(x), op.sin(x)), "chosen")
        builder.emit_func_output(chosen)
    assert kernel_layers(builder.get()) == ()
