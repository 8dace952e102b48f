"""PyTorch's TF32 switches: scripts set them for the whole process, and the next test would begin with them."""

from __future__ import annotations

import sys


def restore_defaults() -> None:
    """Set PyTorch's defaults where a test has left others: off in products, on in convolutions and recurrent networks.

    The older switches of the same meaning come first: where the two disagree, whoever reads the older (`torch.export`
    does) meets an error.
    """
    torch = sys.modules.get("torch")
    if not hasattr(torch, "backends"):
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == ("none", "tf32", "tf32"):
        return
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = True
    matmul.fp32_precision = "none"
    cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "tf32"
