"""Operators that CUDA delegates to a library: names and arguments as in a trace from a GPU.

Without a GPU, PyTorch records the operator before the selection (``aten::convolution``) or a device-neutral one
(``aten::native_batch_norm``).
"""

from __future__ import annotations

from typing import Any

from e2e.step.operator_trace import Tensor


def as_on_gpu(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rename the call ``row``, the last of ``rows``, as on CUDA, and append its additional launches."""
    change = _CHANGES.get(row["name"])
    if change is not None and _on_gpu(row):
        change(row, rows)


def _on_gpu(row: dict[str, Any]) -> bool:
    first = row["inputs"][0] if row["inputs"] else None
    return isinstance(first, Tensor) and first.device != "cpu"


def _convolution(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rename a convolution: cuDNN computes the products; a separate kernel adds the bias (``_convolution`` in
    Convolution.cpp).
    """
    data, weight, bias, stride, padding, dilation, transposed, output_padding, groups = row["inputs"]
    flags = (False, False, True)
    if transposed:
        row["name"] = "aten::cudnn_convolution_transpose"
        row["inputs"] = (data, weight, padding, output_padding, stride, dilation, groups, *flags)
    else:
        row["name"] = "aten::cudnn_convolution"
        row["inputs"] = (data, weight, padding, stride, dilation, groups, *flags)
    if isinstance(bias, Tensor):
        output = row["outputs"][0]
        shaped = Tensor(
            bias.id, bias.storage, (1, *bias.shape, *(1 for _ in output.shape[2:])), bias.dtype, bias.device
        )
        rows.append({**row, "id": len(rows), "name": "aten::add_", "inputs": (output, shaped), "outputs": (output,)})


def _batch_norm(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Rename a batch norm under the conditions of ``_batch_norm_impl_index``: float32, or float16 with float32
    parameters; at least 3 dims.
    """
    backward = row["name"] == "aten::native_batch_norm_backward"
    data = row["inputs"][1 if backward else 0]
    weight = row["inputs"][2 if backward else 1]
    if not isinstance(weight, Tensor) or len(data.shape) < 3 or weight.dtype != "float32":
        return
    if data.dtype not in ("float32", "float16"):
        return
    row["name"] = "aten::cudnn_batch_norm_backward" if backward else "aten::cudnn_batch_norm"


_CHANGES = {
    "aten::convolution": _convolution,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm,
}
