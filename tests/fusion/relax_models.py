"""Small Relax modules for tests, and what stock TVM computes for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from schedules.contract.cpu_target import CpuTarget, host_target

CPU = host_target(2)


class Net:
    """Emits layers with seeded weights into the current dataflow block."""

    def __init__(self, builder: relax.BlockBuilder, seed: int = 0) -> None:
        self.builder = builder
        self.random = np.random.default_rng(seed)

    def __call__(self, expression: Any, name: str = "") -> relax.Var:
        return self.builder.emit(expression, name)

    def constant(self, *shape: int) -> relax.Expr:
        return relax.const(self.random.standard_normal(shape, dtype=np.float32))

    def weight(self, *shape: int) -> relax.Expr:
        scale = np.float32(1.0 / np.sqrt(np.prod(shape[1:])))
        return relax.const(self.random.standard_normal(shape, dtype=np.float32) * scale)

    def conv(self, x: relax.Var, out: int, kernel: int = 1, name: str = "", bias: bool = True, **attributes: Any):
        """A convolution with ``same`` padding unless told, and a bias."""
        groups = attributes.get("groups", 1)
        attributes.setdefault("padding", (kernel // 2,) * 4)
        channels = int(x.ty.shape[1])
        result = self(op.nn.conv2d(x, self.weight(out, channels // groups, kernel, kernel), **attributes), name)
        return self(op.add(result, self.constant(1, out, 1, 1))) if bias else result

    def depthwise(self, x: relax.Var, kernel: int = 3, name: str = "", **attributes: Any) -> relax.Var:
        channels = int(x.ty.shape[1])
        return self.conv(x, channels, kernel, name, groups=channels, **attributes)

    def relu6(self, x: relax.Var) -> relax.Var:
        return self(op.clip(x, 0, 6))


def module(
    shape: Sequence[int], body: Callable[..., Any], *more: Sequence[int], dtype: str = "float32"
) -> tvm.IRModule:
    """A module whose ``main`` takes tensors of the shapes and returns what ``body(net, *inputs)`` returns."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(tuple(size), dtype)) for i, size in enumerate((shape, *more))]
    with builder.function("main", inputs):
        with builder.dataflow():
            result = body(Net(builder), *inputs)
            output = builder.emit_output(tuple(result) if isinstance(result, (tuple, list)) else result)
        builder.emit_func_output(output)
    return builder.get()


def inputs_of(mod: tvm.IRModule, seed: int = 1) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    shapes = [[int(size) for size in parameter.ty.shape] for parameter in mod["main"].params]
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


def stock(mod: tvm.IRModule, arrays: Sequence[np.ndarray], cpu: CpuTarget = CPU) -> list[np.ndarray]:
    """The results of ``main`` as stock TVM computes them."""
    # Without optimisation by LLVM: half of a test's time would go there.
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu.mcpu, "opt-level": 0})
    with target:
        executable = tvm.compile(mod, target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(array) for array in arrays])
    return [value.numpy() for value in ([result] if hasattr(result, "numpy") else result)]


def assert_close(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], tolerance: float = 1e-4) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert left.shape == right.shape
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def kernel_names(mod: tvm.IRModule) -> list[str]:
    """The functions that ``main`` calls, in order; operators of Relax by their name."""
    names = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call):
                called = binding.value
                is_kernel = called.op.name == "relax.call_tir"
                names.append(called.args[0].name_hint if is_kernel else called.op.name)
    return names
