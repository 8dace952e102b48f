"""PyTorch's switches for TF32 as a script leaves them: what of float32 runs on TF32 units of GPUs that have such."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from costmodel.machines.machine_records import Machine


@dataclass(frozen=True)
class Tf32Switches:
    """What of float32 runs in TF32: ``products`` of matrices (cuBLAS), ``convolutions`` and ``recurrent`` networks
    (cuDNN). The defaults ask for none of it.
    """

    products: bool = False
    convolutions: bool = False
    recurrent: bool = False

    def on(self, machine: Machine) -> Tf32Switches:
        """What they do on ``machine``: nothing where it has no such units."""
        return self if "tf32" in machine.compute else NO_TF32

    @property
    def described(self) -> str:
        """``TF32 off``, or in what it is on."""
        parts = (
            ("products", self.products),
            ("convolutions", self.convolutions),
            ("recurrent networks", self.recurrent),
        )
        *more, last = [name for name, is_on in parts if is_on] or [""]
        return f"TF32 in {', '.join(more)}{' and ' if more else ''}{last}" if last else "TF32 off"


NO_TF32 = Tf32Switches()


def tf32_switches() -> Tf32Switches:
    """Those of this process. PyTorch's own defaults are on in cuDNN's kernels, off in products
    (``set_float32_matmul_precision``, ``torch.backends.cuda.matmul.allow_tf32``).
    """
    cudnn = torch.backends.cudnn
    switches = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    # The older `allow_tf32` raises where a script has set the newer ones, not the other way round.
    return Tf32Switches(*(switch.fp32_precision == "tf32" for switch in switches))
