"""Small quantised networks as ONNX files, and what they compute; shared by tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from schedules.contract.cpu_target import CpuTarget, host_target
from tests.onnx_sessions import exact_session

INPUT = (1, 3, 24, 24)
HOST = host_target(2)
EMULATED = "int8" not in HOST.dot_products
CPU = CpuTarget(16, 32, "cascadelake", ("avx512f", "avx512_vnni"), 2, 32 * 1024, 1024 * 1024)


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


class QuantisedGraph:
    """An ONNX graph under construction; its input is ``x``. ``signed``: whether bytes have a sign."""

    def __init__(self, signed=False):
        self.signed = signed
        self.nodes, self.constants = [], []

    def constant(self, array, name):
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, operator, *inputs, name=None, outputs=1, domain="", **attributes):
        name = name or f"{operator}_{len(self.nodes)}"
        results = [name] if outputs == 1 else [f"{name}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), results, name, domain=domain, **attributes))
        return name if outputs == 1 else results

    def step(self, value, scale, zero):
        """``value`` to bytes and back; ``zero`` as of bytes without a sign."""
        name = f"{value}_s{len(self.nodes)}"
        self.constant(np.float32(scale), f"{name}_scale")
        self.constant(np.int8(zero - 128) if self.signed else np.uint8(zero), f"{name}_zero")
        given = [f"{name}_scale", f"{name}_zero"]
        quantised = self.add("QuantizeLinear", value, *given, name=f"{name}_q")
        return self.add("DequantizeLinear", quantised, *given, name=f"{name}_d")

    def save(self, path, result, shape, opset=17, data=(1, 16, 4, 8)):
        given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, data)]
        made = [helper.make_tensor_value_info(result, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(self.nodes, "steps", given, made, self.constants)
        opsets = [("", opset), ("com.microsoft", 1)]
        model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid(*each) for each in opsets])
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path

    def weights(self, outputs, inputs, size=1, name="w", scale=0.01):
        """(outputs, inputs, size, size) bytes with a sign, back in floats; no dimensions of one pixel where ``size`` is
        zero.
        """
        shape = (outputs, inputs, size, size) if size else (outputs, inputs)
        self.constant(np.random.default_rng(outputs).integers(-127, 128, shape).astype(np.int8), name)
        self.constant(np.asarray(scale, np.float32), f"{name}_scale")
        self.constant(np.zeros(np.shape(scale), np.int8), f"{name}_zero")
        options = {"axis": 0} if np.ndim(scale) else {}
        given = [name, f"{name}_scale", f"{name}_zero"]
        return self.add("DequantizeLinear", *given, name=f"{name}_d", **options)


def theirs(path, data):
    """What ONNX Runtime computes."""
    session = exact_session(str(path))
    return session.run(None, {"x": data})[0]


def ours(path, data, fused=False, covered=True, cpu=CPU):
    """What our network computes, every site fused that overlaps no other, or none; by templates where ``covered``."""
    import tvm
    from tvm import relax

    from fusion.model.conv_graph import FusionPlan, cover, find_sites
    from fusion.relax.extract import extract_graph
    from fusion.relax.layout_lowering import lower
    from fusion.relax.machine_code import build_executable
    from fusion.relax.onnx.importer import import_onnx
    from schedules.kernels.template_table import template_for

    imported = import_onnx(path, whole_numbers=cpu.lacks("int8") is None)
    graph = extract_graph(imported.mod)
    chosen, taken = [], set()
    for site in find_sites(graph, cpu) if fused else ():
        names = {node.name for node in site.nodes}
        if not names & taken:
            chosen.append(site)
            taken |= names
    assert not fused or chosen
    plan = cover(graph, chosen)
    templates = {operator: template_for(operator, cpu) for operator in plan.operators if covered}
    configs = {operator: each.space(operator, cpu)[0] for operator, each in templates.items() if each is not None}
    plan = FusionPlan(tuple(group for group in plan.groups if group.operator in configs))
    lowered = lower(imported.mod, plan, configs, cpu)
    made_here = replace(cpu, mcpu=HOST.mcpu) if cpu.lanes == 16 else cpu
    executable = build_executable(lowered, made_here, emulated=EMULATED and cpu.lacks("int8") is None)
    library = str(path.with_suffix(".so"))
    executable.export_library(library)
    machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(data)).numpy()
