"""Whatever no template covers is compiled in parallel and in vectors, computes the same, and is listed."""

# ruff: noqa: E402

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm import relax, tirx
from tvm.relax import op

from costmodel.base.errors import OutputError
from fusion.model.conv_graph import unfused_plan
from fusion.relax import leftovers
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.leftovers import leftover_kernels
from fusion.relax.machine_code import build_executable, scheduling_pipeline
from schedules.kernels.template_table import template_for
from tests.fusion.relax_models import CPU, assert_close, inputs_of, kernel_names, module, stock

# Large enough for a parallel region, sizes that no vector divides among them.
SHAPE = (2, 24, 30, 28)
ODD = (2, 13, 31, 23)

LEFTOVERS = {
    "softmax": lambda net, x: op.nn.softmax(x, axis=-1),
    "softmax_channels": lambda net, x: op.nn.softmax(x, axis=1),
    "layer_norm": lambda net, x: op.nn.layer_norm(
        x, net.constant(int(x.ty.shape[3])), net.constant(int(x.ty.shape[3])), axes=[-1]
    ),
    "mean_channels": lambda net, x: op.mean(x, [1]),
    "mean_rows": lambda net, x: op.mean(x, [3]),
    "maximum_of_all": lambda net, x: op.max(x),
    "broadcast": lambda net, x: op.multiply(x, net.constant(int(x.ty.shape[1]), 1, 1)),
    "element_wise": lambda net, x: op.add(net(op.exp(x)), net(op.tanh(x))),
    "transpose": lambda net, x: op.permute_dims(x, [0, 2, 3, 1]),
    "dilated_pool": lambda net, x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1), (2, 2)),
    "resize": lambda net, x: op.image.resize2d(x, relax.ShapeExpr([60, 56]), layout="NCHW", method="linear"),
    "transposed_conv": lambda net, x: op.nn.conv2d_transpose(
        x, net.weight(int(x.ty.shape[1]), 8, 3, 3), strides=(2, 2), padding=(1, 1)
    ),
    "products": lambda net, x: op.matmul(x, net(op.permute_dims(x, [0, 1, 3, 2]))),
    "pad": lambda net, x: op.nn.pad(x, [0, 0, 0, 0, 1, 2, 3, 4]),
    "slice": lambda net, x: op.strided_slice(x, axes=[2], begin=[1], end=[9]),
    "argmax": lambda net, x: op.argmax(x, axis=1),
    "cumsum": lambda net, x: op.cumsum(x, axis=2),
}


@pytest.fixture(scope="module")
def every_leftover():
    """All of them in one module each, on both shapes: compiled once."""
    bodies = list(LEFTOVERS.values())
    results = {}
    for shape in (SHAPE, ODD):
        mod = module(shape, lambda net, x: [net(body(net, x)) for body in bodies])
        compiled, arrays = build_executable(mod, CPU), inputs_of(mod)
        results[shape] = (compiled, compiled(*arrays), stock(mod, arrays))
    return results


@pytest.mark.parametrize("shape", [SHAPE, ODD])
@pytest.mark.parametrize("name", LEFTOVERS)
def test_leftovers_compute_what_stock_tvm_computes(every_leftover, shape, name):
    _, actual, expected = every_leftover[shape]
    index = list(LEFTOVERS).index(name)
    assert_close(actual[index : index + 1], expected[index : index + 1])


def test_leftovers_are_listed_and_parallel(every_leftover):
    compiled, _, _ = every_leftover[SHAPE]
    schedules = {kernel.name: kernel.schedule for kernel in compiled.leftovers}
    assert {"softmax", "conv2d_transpose", "resize2d", "cumsum"} <= set(schedules)
    assert all("parallel" in schedule for schedule in schedules.values()), schedules
    assert sum("vectorized" in schedule for schedule in schedules.values()) >= 10, schedules


def scheduled(body, shape=SHAPE) -> tirx.PrimFunc:
    mod = scheduling_pipeline(CPU)(module(shape, lambda net, x: net(body(net, x))))
    (function,) = [function for function in mod.functions.values() if isinstance(function, tirx.PrimFunc)]
    return function


@pytest.mark.parametrize("name", ["softmax", "broadcast", "transpose", "mean_channels"])
def test_schedules_are_parallel_with_vectors(name):
    function = scheduled(LEFTOVERS[name])
    script = function.script()
    assert "T.parallel" in script and "T.vectorized" in script
    assert function.attrs["fusion.schedule"] == "parallel-vectorized"


def test_padding_is_not_evaluated_inside_a_reduction():
    script = scheduled(LEFTOVERS["transposed_conv"]).script()
    product = next(line for line in script.splitlines() if "compute[v0, v1, v2, v3] +" in line)
    assert "if_then_else" not in product and "T.parallel" in script


def test_a_small_kernel_starts_no_parallel_region():
    assert "T.parallel" not in scheduled(LEFTOVERS["element_wise"], (1, 16, 1, 1)).script()


def test_a_rule_that_fails_gives_way_to_a_simpler_one(monkeypatch):
    def broken(function, cpu):
        raise ValueError("not applicable")

    monkeypatch.setattr(leftovers, "_parallel_vectorized", broken)
    mod = module(SHAPE, lambda net, x: net(op.nn.softmax(x, axis=1)))
    compiled = build_executable(mod, CPU)
    assert [kernel.schedule for kernel in compiled.leftovers] == ["parallel"]
    assert_close(compiled(*inputs_of(mod)), stock(mod, inputs_of(mod)))
    monkeypatch.setattr(leftovers, "_parallel_outermost", broken)
    assert [kernel.schedule for kernel in build_executable(mod, CPU).leftovers] == ["serial"]


def test_kernels_of_templates_are_no_leftovers_and_stay_as_they_are():
    mod = module((1, 3, 9, 7), lambda net, x: net(op.argmax(net.conv(x, 24), axis=1)))
    plan = unfused_plan(extract_graph(mod))
    configs = {operator: template_for(operator, CPU).space(operator, CPU)[0] for operator in plan.operators}
    result = lower(mod, plan, configs, CPU)
    final = scheduling_pipeline(CPU)(result)
    (name,) = [name for name in kernel_names(result) if name.startswith("conv2d")]
    tvm.ir.assert_structural_equal(result[name].body, final[name].body)
    assert [kernel.name for kernel in leftover_kernels(final)] == ["argmax"]


def test_reshapes_are_views_also_of_inputs_and_results():
    def body(net, x):
        flat = net(op.reshape(x, (6, -1)))
        return net(op.reshape(net(op.nn.relu(flat)), (3, 2, -1))), flat, net(op.expand_dims(x, 0)), x

    mod = module((2, 3, 8, 4), body)
    compiled = build_executable(mod, CPU)
    arrays = inputs_of(mod)
    assert_close(compiled(*arrays), [np.maximum(arrays[0], 0).reshape(3, 2, -1), arrays[0].reshape(6, -1),
                                     arrays[0][None], arrays[0]])  # fmt: skip
    assert [kernel.name for kernel in compiled.leftovers] == ["relu"]


def test_results_of_two_runs_do_not_share_memory():
    mod = module(SHAPE, lambda net, x: [net(op.nn.relu(net(op.tanh(x)))), net(op.negative(x))])
    machine = build_executable(mod, CPU).machine()
    array = inputs_of(mod)[0]
    first = machine["main"](tvm.runtime.tensor(array))
    machine["main"](tvm.runtime.tensor(array * 2))
    np.testing.assert_allclose(first[0].numpy(), np.maximum(np.tanh(array), 0), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(first[1].numpy(), -array)


def test_a_scalar_is_an_input_like_others():
    mod = module((), lambda net, x: net(op.negative(x)))
    compiled = build_executable(mod, CPU)
    (result,) = compiled(np.float32(2.0))
    assert result.shape == () and result == -2.0
    compiled.bind(np.float32(2.0))()


def test_a_bound_call_computes_again():
    mod = module(SHAPE, lambda net, x: net(op.nn.relu(x)))
    call = build_executable(mod, CPU).bind(*inputs_of(mod))
    call()
    call()


def test_an_exported_library_runs_with_the_runtime_alone(tmp_path):
    mod = module(SHAPE, lambda net, x: net(op.nn.softmax(x, axis=1)))
    arrays = inputs_of(mod)
    build_executable(mod, CPU).export_library(tmp_path / "model.so")
    np.save(tmp_path / "x.npy", arrays[0])
    code = (
        "import numpy, tvm\n"
        "from tvm.runtime.vm import VirtualMachine\n"
        "vm = VirtualMachine(tvm.runtime.load_module('model.so'), tvm.cpu())\n"
        "numpy.save('y.npy', vm['main'](tvm.runtime.tensor(numpy.load('x.npy'))).numpy())\n"
    )
    environment = {**os.environ, "TVM_USE_RUNTIME_LIB": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert_close([np.load(tmp_path / "y.npy")], stock(mod, arrays))


def test_a_library_that_cannot_be_written_is_one_clear_line(tmp_path):
    compiled = build_executable(module((1, 4, 2, 2), lambda net, x: net(op.nn.relu(x))), CPU)
    with pytest.raises(OutputError, match="model.so: the compiled model cannot be written") as caught:
        compiled.export_library(tmp_path / "absent" / "model.so")
    assert "\n" not in str(caught.value)
