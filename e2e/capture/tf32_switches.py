"""PyTorch's TF32 switches as set by a script: float32 operations that run on TF32 units, on GPUs that have them."""

from __future__ import annotations

import torch

from e2e.step.options import Tf32Switches


def tf32_switches() -> Tf32Switches:
    """Return the switches of this process.

    PyTorch's own defaults are on in cuDNN's kernels, off in products (``set_float32_matmul_precision``,
    ``torch.backends.cuda.matmul.allow_tf32``).
    """
    cudnn = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    # The older `allow_tf32` raises if a script has set the newer ones, but not vice versa.
    return Tf32Switches(*(switch.fp32_precision == "tf32" for switch in switches))
