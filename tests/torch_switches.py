"""PyTorch's TF32 switches: scripts set them for the whole process, and the next test would begin with them."""

from __future__ import annotations

import sys

# Of products, convolutions and recurrent networks.
DEFAULTS = ["none", "tf32", "tf32"]


def switches() -> list[str]:
    """Precision of float32 products, convolutions and recurrent networks."""
    import torch

    parts = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    return [each.fp32_precision for each in parts]


def set_switches(precisions: list[str]) -> None:
    """Set PyTorch's switches for products, convolutions and recurrent networks, the older ones of the same meaning
    first: where the two disagree, whoever reads the older (`torch.export` does) meets an error.
    """
    import torch

    products, convolutions, recurrent = precisions
    torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = convolutions == "tf32"
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = convolutions
    torch.backends.cudnn.rnn.fp32_precision = recurrent


def restore_defaults() -> None:
    """Set PyTorch's defaults where a test has left others."""
    if hasattr(sys.modules.get("torch"), "backends") and switches() != DEFAULTS:
        set_switches(DEFAULTS)
