"""An ONNX model as one flat ``torch.fx.GraphModule`` of ATen calls: converted, traced, simplified, cast to BF16.

onnx2fx's graph calls helpers that read shapes, pads and limits from tensors at run time. Traced on example inputs,
these become constants. Exporters and converters also leave empty pads, limits as tensors and separate batch norms;
eager PyTorch executes them all, and oneDNN fuses a ReLU6 into its convolution only if the limits are numbers. The
simplified graph corresponds to a native PyTorch model for eager, TorchScript and Inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate
from torch.nn.utils.fusion import fuse_conv_bn_weights

from fusion.comparing.engine import Unavailable

Tensors = tuple[torch.Tensor, ...]

aten = torch.ops.aten
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_PADDING = 4  # index of the padding in a convolution's arguments: data, weight, bias, stride, padding
# Traces of tensor values read from Python (`Tensor.tolist`, `Tensor.numpy`).
_READS = (aten.resolve_conj.default, aten.resolve_neg.default)


def convert_to_torch(path: Path, examples: Mapping[str, np.ndarray], outputs: Sequence[str]) -> GraphModule:
    """Convert the model of ``path`` for the shapes of ``examples``; the module takes them in order and returns a tuple.

    Raises ``Unavailable`` with the converter's reason, e.g. an unsupported operator.
    """
    import onnx2fx

    model = onnx.load(str(path))
    try:
        converted = onnx2fx.convert(model).eval()
        with torch.inference_mode(False), torch.no_grad():
            call = _by_name(converted, model.graph, tuple(examples), outputs)
            flat = make_fx(call, pre_dispatch=True)(*(torch.from_numpy(np.array(array)) for array in examples.values()))
            return simplify(flat).eval()
    except Exception as error:  # the library and the tracer raise errors of many kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise Unavailable(f"onnx2fx {_version()} cannot convert the model to PyTorch: {reason}") from error


def _by_name(
    converted: GraphModule, graph: onnx.GraphProto, inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., Tensors]:
    """``converted`` with inputs in the order ``inputs``, returning the outputs ``outputs``."""
    stored = {tensor.name for tensor in graph.initializer}
    places = [inputs.index(value.name) for value in graph.input if value.name not in stored]
    produced = [value.name for value in graph.output]
    wanted = [produced.index(name) for name in outputs]

    def call(*tensors: torch.Tensor) -> Tensors:
        results = converted(*(tensors[place] for place in places))
        results = (results,) if isinstance(results, torch.Tensor) else results
        return tuple(results[place] for place in wanted)

    return call


def _version() -> str:
    from importlib.metadata import version

    return version("onnx2fx")


def simplify(module: GraphModule) -> GraphModule:
    """Evaluate constant calls and remove operators without effect in ``module``, in place.

    Raises ``ValueError`` if the trace depends on the values of its example inputs: it would be wrong for others.
    """
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_constant(node):
            _replace(module, node, node.target(*_values(module, node.args), **_values(module, node.kwargs)))
    if any(module.graph.find_nodes(op="call_function", target=read) for read in _READS):
        raise ValueError("a shape or another setting of an operator depends on the values of an input")
    for target, rule in _RULES.items():
        for node in module.graph.find_nodes(op="call_function", target=target):
            rule(module, node)
    return _cleaned(module)


def fold_batch_norms(module: GraphModule) -> GraphModule:
    """Copy of ``module`` with batch norms folded into convolutions with constant weights that have no other reader."""
    folded = copy.deepcopy(module)
    for node in folded.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        convolution = node.args[0]
        if convolution.target in _CONVOLUTIONS and len(convolution.users) == 1 and _is_constant_weight(convolution):
            _fold_batch_norm(folded, convolution, node)
    return _cleaned(folded)


def _fold_batch_norm(module: GraphModule, convolution: Node, norm: Node) -> None:
    weight, bias = _values(module, _arguments(convolution)[1:3])
    scale, shift, mean, variance, _, _, epsilon, _ = _values(module, norm.args[1:])
    fused = fuse_conv_bn_weights(weight, bias, mean, variance, epsilon, scale, shift)
    with module.graph.inserting_before(convolution):
        nodes = [_constant(module, tensor.detach()) for tensor in fused]
    convolution.args = (convolution.args[0], *nodes, *convolution.args[3:])
    norm.replace_all_uses_with(convolution)


def _drop_pad(module: GraphModule, pad: Node) -> None:
    """Remove empty pads, and move symmetric zero padding into the convolutions that follow."""
    data, widths, mode, value = _arguments(pad)
    if not any(widths):
        pad.replace_all_uses_with(data)
        return
    spatial = 2 * (pad.meta["val"].dim() - 2)
    widths, outer = [*widths, *[0] * (spatial - len(widths))][:spatial], widths[spatial:]
    befores, afters = widths[::2][::-1], widths[1::2][::-1]  # PyTorch lists the last axis first
    if mode != "constant" or value or any(outer) or befores != afters or min(befores) < 0:
        return
    if all(user.target in _CONVOLUTIONS and user.args[0] is pad for user in pad.users):
        for user in list(pad.users):
            arguments = _arguments(user)
            arguments[_PADDING] = [old + new for old, new in zip(arguments[_PADDING], befores, strict=True)]
            user.args = (data, *arguments[1:])


def _clamp_to_numbers(module: GraphModule, clamp: Node) -> None:
    """Replace constant scalar limits of a clamp by numbers."""
    limits = [module.get_buffer(limit.target) if _is_buffer(limit) else limit for limit in _arguments(clamp)[1:]]
    if any(isinstance(limit, Node) or (limit is not None and limit.numel() != 1) for limit in limits):
        return
    clamp.args = (clamp.args[0], *(None if limit is None else limit.item() for limit in limits))
    clamp.target = aten.clamp.default


def _drop_unit_factor(module: GraphModule, product: Node) -> None:
    """Remove a product with the number 1.0 (``alpha`` and ``beta`` of a Gemm)."""
    if product.args[1] == 1.0 and not isinstance(product.args[1], Node) and product.meta["val"].is_floating_point():
        product.replace_all_uses_with(product.args[0])


_RULES: dict[Any, Callable[[GraphModule, Node], None]] = {
    aten.pad.default: _drop_pad,
    aten.clamp.Tensor: _clamp_to_numbers,
    aten.mul.Tensor: _drop_unit_factor,
}


def _arguments(node: Node) -> list[Any]:
    """All positional arguments, with the defaults of the schema for missing ones."""
    left_out = node.target._schema.arguments[len(node.args) :]  # type: ignore[union-attr]
    return [*node.args, *(argument.default_value for argument in left_out)]


def _is_buffer(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "get_attr"


def _is_constant_weight(convolution: Node) -> bool:
    return all(operand is None or _is_buffer(operand) for operand in _arguments(convolution)[1:3])


def _is_constant(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    return not random and all(_is_buffer(operand) for operand in node.all_input_nodes)


def _values(module: GraphModule, arguments: Any) -> Any:
    return torch.fx.node.map_arg(arguments, lambda node: module.get_buffer(node.target))


def _replace(module: GraphModule, node: Node, value: Any) -> None:
    """Replace ``node`` by the constant ``value``; values that are no tensor (tuples) stay calls."""
    if isinstance(value, torch.Tensor):
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(_constant(module, value.detach().clone()))
        module.graph.erase_node(node)


def _constant(module: GraphModule, tensor: torch.Tensor) -> Node:
    graph: Graph = module.graph
    name = f"folded_{sum(1 for _ in module.buffers())}"
    module.register_buffer(name, tensor)
    node = graph.get_attr(name)
    node.meta["val"] = tensor
    return node


def _cleaned(module: GraphModule) -> GraphModule:
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.delete_all_unused_submodules()
    module.recompile()
    return module


class InBfloat16(torch.nn.Module):
    """``graph`` with weights, activations and constants in BF16.

    Inputs and outputs stay in FP32, as in other engines: the casts are part of the measured time.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = _cast(graph)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs in the precision of ``graph``."""
        halved = [each.to(torch.bfloat16) if each.dtype == torch.float32 else each for each in inputs]
        return _widened(self.graph(*halved))


class UnderAutocast(torch.nn.Module):
    """``graph`` with autocast: PyTorch runs the operators it considers safe (convolutions, products) in BF16."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph = copy.deepcopy(graph)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs in FP32."""
        # Without the cache a trace contains the casts of weights, which freezing evaluates.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            results = self.graph(*inputs)
        return _widened(results)


def require_bfloat16() -> str:
    """Name of the hardware that computes BF16 here; raises ``Unavailable`` if PyTorch's convolutions have no BF16."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise Unavailable(f"PyTorch {torch.__version__} has no BF16 convolutions for this CPU: it lacks AVX-512")
    if torch.cpu._is_amx_tile_supported():
        return "AMX"
    return "AVX512-BF16" if torch.cpu._is_avx512_bf16_supported() else "BF16 converted to FP32: the CPU has none"


def _cast(graph: GraphModule) -> GraphModule:
    """Copy with floating-point constants and explicit operator dtypes changed to BF16."""
    cast = copy.deepcopy(graph).to(torch.bfloat16)
    for node in cast.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, _type), map_aggregate(node.kwargs, _type)
    cast.recompile()
    return cast


def _type(argument: Any) -> Any:
    return torch.bfloat16 if argument is torch.float32 else argument


def _widened(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(each.float() if each.dtype == torch.bfloat16 else each for each in results)
