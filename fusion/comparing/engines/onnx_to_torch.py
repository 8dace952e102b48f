"""An ONNX model as one flat ``torch.fx.GraphModule`` of ATen calls: converted by onnx2fx, traced, simplified.

The library's graph calls helpers that read shapes, pads and limits from tensors when they run. Traced on example
inputs, these become plain numbers, and what is left is what a native PyTorch model would have: eager, TorchScript and
Inductor see an ordinary model (:mod:`fusion.comparing.engines.torch_folding` removes the rest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.comparing.engines.base import Unavailable
from fusion.comparing.engines.torch_folding import simplify

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = tuple[torch.Tensor, ...]


def convert(path: Path, examples: Mapping[str, np.ndarray], outputs: Sequence[str]) -> torch.fx.GraphModule:
    """Convert the model of ``path`` for the shapes of ``examples``; the module takes them in order, returns a tuple.

    Raises ``Unavailable`` with the converter's reason, such as an operator that it does not know.
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
    converted: torch.fx.GraphModule, graph: onnx.GraphProto, inputs: Sequence[str], outputs: Sequence[str]
) -> Callable[..., Tensors]:
    """``converted`` with its inputs in the order ``inputs`` and of its outputs those of ``outputs``."""
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
