"""A naive template for tests, whose config can break it in every way that the runner must survive."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np

from costmodel.operators.layers import Dense, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Signature, Template, TensorSpec

FAULTS = ("none", "crash", "abort", "hang", "raise", "wrong", "unwritten", "overrun", "clobber", "slow")


def fault(name: str, **knobs: int) -> dict[str, int]:
    """A config that makes :class:`NaiveDense` fail in this way."""
    return {"fault": FAULTS.index(name), "split": 1, **knobs}


class NaiveDense(Template):
    """``y = x w^T + b`` as the plainest loop nest; knob ``split`` divides the loop over features."""

    family = "naive-dense"

    def signature(self, operator: Dense, cpu: CpuTarget) -> Signature:
        constants = (TensorSpec(operator.weight_shape), TensorSpec((operator.out_features,)))
        return Signature(TensorSpec(operator.input_shape), constants, None, TensorSpec(operator.output_shape))

    def space(self, operator: Dense, cpu: CpuTarget) -> list[dict[str, int]]:
        splits = [n for n in range(1, operator.out_features + 1) if operator.out_features % n == 0]
        return [fault("none", split=split) for split in splits]

    def pack(self, operator: Dense, parameters: Any, cpu: CpuTarget) -> list[np.ndarray]:
        (layer,) = parameters
        bias = layer.bias if layer.bias is not None else np.zeros(operator.out_features, np.float32)
        return [layer.weight, bias]

    def build(self, operator: Dense, config: Any, cpu: CpuTarget) -> Any:
        kind = FAULTS[config["fault"]]
        if kind == "crash":
            ctypes.memset(0, 1, 8)
        if kind == "abort":
            os.write(2, b"LLVM ERROR: cannot select\n")
            os.abort()
        if kind == "hang":
            time.sleep(1000)
        if kind == "raise":
            raise ValueError("first line\nno such tile")
        return dense_kernel(operator, config["split"], kind)


def dense_kernel(operator: Dense, split: int, kind: str) -> Any:
    from tvm.script.ir_builder import IRBuilder
    from tvm.script.ir_builder import tirx as T

    rows, ins, outs = operator.rows, operator.in_features, operator.out_features
    with IRBuilder() as builder, T.prim_func():
        T.func_name("kernel")
        x = T.arg("x", T.buffer((rows, ins), "float32"))
        w = T.arg("w", T.buffer((outs, ins), "float32"))
        b = T.arg("b", T.buffer((outs,), "float32"))
        y = T.arg("y", T.buffer((rows, outs), "float32"))
        repeats = 2000 if kind == "slow" else 1
        stop = outs // split - (1 if kind == "unwritten" else 0)
        with T.serial(0, repeats) as _, T.serial(0, rows) as i, T.serial(0, split) as part, T.serial(0, stop) as j0:
            j = part * (outs // split) + j0
            T.buffer_store(y, b[j], [i, j])
            with T.serial(0, ins - (1 if kind == "wrong" else 0)) as k:
                T.buffer_store(y, y[i, j] + x[i, k] * w[j, k], [i, j])
        if kind == "overrun":
            T.buffer_store(y, T.float32(7.0), [rows - 1, outs + 3])
        if kind == "clobber":
            T.buffer_store(x, x[0, 0] + T.float32(1.0), [0, 0])
    return builder.get()


def template_for(operator: Operator, cpu: CpuTarget) -> NaiveDense | None:
    return NaiveDense() if isinstance(operator, Dense) else None
