"""PyTorch's switches for TF32 as a script leaves them: what of float32 runs on TF32 units of GPUs that have such."""

from __future__ import annotations

import torch

from e2e.step.options import Tf32Switches


def tf32_switches() -> Tf32Switches:
    """Those of this process. PyTorch's own defaults are on in cuDNN's kernels, off in products
    (``set_float32_matmul_precision``, ``torch.backends.cuda.matmul.allow_tf32``).
    """
    cudnn = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    # The older `allow_tf32` raises where a script has set the newer ones, not the other way round.
    return Tf32Switches(*(switch.fp32_precision == "tf32" for switch in switches))
