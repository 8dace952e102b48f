"""What kernels cost on a GPU: analytic models per family, corrected by what was measured."""

from costmodel.gpu.factory import gpu_cost_model

__all__ = ["gpu_cost_model"]
