"""Autocast as on CUDA: PyTorch applies it by device, and the meta device has none.

The lists are those of ``aten/src/ATen/autocast_mode.h`` (``AT_FORALL_LOWER_PRECISION_FP`` and ``AT_FORALL_FP32``), for
the functions that a script can call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

LOWER_PRECISION = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
    + ("addmm", "addmv", "addr", "matmul", "__matmul__", "einsum", "mm", "mv", "linear", "addbmm", "baddbmm", "bmm")
    + ("chain_matmul", "prelu", "scaled_dot_product_attention")
)
FULL_PRECISION = frozenset(
    ("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh")
    + ("tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "nuclear_norm", "cosine_similarity")
    + ("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div")
    + ("l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss")
    + ("soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits")
    + ("dist", "pdist", "cdist", "renorm", "logsumexp", "softmax", "log_softmax", "cumprod", "cumsum", "prod", "sum")
    + ("cross_entropy_loss", "norm", "rms_norm")
)
WIDEST = frozenset(
    ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sample", "index_put", "tensordot")
    + ("scatter_add", "cat", "stack")
)


def cast_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast the arguments of the function ``name`` as autocast would; the casts are recorded like any operator.

    Weights are cast at each use: PyTorch caches the cast of a weight within one autocast region, which matters for
    weights that are used more than once.
    """
    if name in LOWER_PRECISION:
        target = torch.get_autocast_dtype("cuda")
    elif name in FULL_PRECISION:
        target = torch.float32
    elif name in WIDEST:
        target = _widest([*args, *kwargs.values()])
    else:
        return tuple(args), dict(kwargs)
    with torch.autocast("cuda", enabled=False):
        return tuple(_cast(arg, target) for arg in args), {key: _cast(arg, target) for key, arg in kwargs.items()}


def _cast(value: Any, target: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        eligible = value.is_floating_point() and value.dtype is not torch.float64 and value.device.type == "meta"
        return value.to(target) if eligible and value.dtype is not target else value
    if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_cast(item, target) for item in value)
    return value


def _widest(values: Sequence[Any]) -> torch.dtype:
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
    found = {value.dtype for value in flat if isinstance(value, torch.Tensor)}
    return torch.float32 if torch.float32 in found else torch.get_autocast_dtype("cuda")
