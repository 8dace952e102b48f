"""Small quantised networks as ONNX files, made by ONNX Runtime's own quantiser; shared by tests."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

INPUT = (1, 3, 24, 24)


def float_network(residual: bool = True):
    """Stem, inverted residual with an addition, max pooling, 3x3, global average, dense layer."""
    generator = np.random.default_rng(0)
    nodes, constants = [], []

    def constant(name, *shape):
        spread = 1.0 / np.sqrt(max(1, np.prod(shape[1:])))
        constants.append(numpy_helper.from_array((generator.standard_normal(shape) * spread).astype(np.float32), name))
        return name

    def layer(source, name, outputs, inputs, kernel, stride=1, groups=1, activation=None):
        weight, bias = constant(f"{name}.w", outputs, inputs // groups, kernel, kernel), constant(f"{name}.b", outputs)
        options = {"strides": [stride] * 2, "pads": [kernel // 2] * 4, "group": groups, "kernel_shape": [kernel] * 2}
        nodes.append(helper.make_node("Conv", [source, weight, bias], [name], name, **options))
        if activation == "Clip":
            nodes.append(helper.make_node("Clip", [name, "zero", "six"], [f"{name}.a"], f"{name}.clip"))
        elif activation:
            nodes.append(helper.make_node(activation, [name], [f"{name}.a"], f"{name}.act"))
        return f"{name}.a" if activation else name

    constants += [numpy_helper.from_array(np.float32(value), name) for name, value in (("zero", 0.0), ("six", 6.0))]
    x = layer("x", "stem", 16, 3, 3, 2, activation="Clip")
    y = layer(x, "expand", 40, 16, 1, activation="Clip")
    y = layer(y, "depthwise", 40, 40, 3, groups=40, activation="Relu")
    y = layer(y, "project", 16, 40, 1)
    if residual:
        nodes.append(helper.make_node("Add", [x, y], ["sum"], "sum"))
        y = "sum"
    nodes.append(helper.make_node("MaxPool", [y], ["pooled"], "pool", kernel_shape=[2, 2], strides=[2, 2]))
    y = layer("pooled", "window", 24, 16, 3, activation="Relu")
    nodes.append(helper.make_node("GlobalAveragePool", [y], ["mean"], "mean"))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"], "flat"))
    weight, bias = constant("dense.w", 20, 24), constant("dense.b", 20)
    nodes.append(helper.make_node("Gemm", ["flat", weight, bias], ["logits"], "dense", transB=1))
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, INPUT)]
    result = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, (1, 20))]
    graph = helper.make_graph(nodes, "small", given, result, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class _Samples(CalibrationDataReader):
    def __init__(self) -> None:
        generator = np.random.default_rng(1)
        self._left = [{"x": generator.standard_normal(INPUT).astype(np.float32)} for _ in range(3)]

    def get_next(self):
        return self._left.pop() if self._left else None


def quantised(path, operators=False, per_channel=False, signed=False, unsigned_weights=False):
    """The file of the network, quantised: in QDQ form, or of quantised ``operators``."""
    import onnx

    source = path.with_suffix(".float.onnx")
    onnx.save(float_network(), source)
    quantize_static(
        source,
        path,
        _Samples(),
        quant_format=QuantFormat.QOperator if operators else QuantFormat.QDQ,
        per_channel=per_channel,
        activation_type=QuantType.QInt8 if signed else QuantType.QUInt8,
        weight_type=QuantType.QUInt8 if unsigned_weights else QuantType.QInt8,
    )
    return path
