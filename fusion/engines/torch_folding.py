"""Batch norms folded into the convolutions before them, on the fx graphs that :mod:`onnx_to_torch` makes."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def fold_batch_norms(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of ``module`` in which every batch norm that alone follows a convolution with constant weights is gone."""
    folded = copy.deepcopy(module)
    for node in list(folded.graph.nodes):
        convolution = node.args[0] if node.target is F.batch_norm else None
        if convolution is not None and _foldable(convolution):
            _fold(folded, convolution, node)
    folded.graph.eliminate_dead_code()
    folded.graph.lint()
    folded.recompile()
    return folded


def _foldable(node: torch.fx.Node) -> bool:
    constant = all(operand is None or operand.op == "get_attr" for operand in node.args[1:3])
    return node.target in _CONVOLUTIONS and len(node.users) == 1 and constant


def _fold(module: torch.fx.GraphModule, convolution: torch.fx.Node, norm: torch.fx.Node) -> None:
    weight, bias = (_tensor(module, operand) for operand in convolution.args[1:3])
    mean, variance, scale, shift = (_tensor(module, operand) for operand in norm.args[1:5])
    fused = fuse_conv_bn_weights(weight, bias, mean, variance, norm.kwargs["eps"], scale, shift)
    nodes = []
    with module.graph.inserting_before(convolution):
        for role, tensor in zip(("weight", "bias"), fused, strict=True):
            name = f"{norm.name}_folded_{role}"
            module.register_buffer(name, tensor.detach())
            nodes.append(module.graph.get_attr(name))
    convolution.args = (convolution.args[0], *nodes)
    norm.replace_all_uses_with(convolution)
    module.graph.erase_node(norm)


def _tensor(module: torch.fx.GraphModule, node: torch.fx.Node | None) -> torch.Tensor | None:
    return None if node is None else module.get_buffer(str(node.target))
