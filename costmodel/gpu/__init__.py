"""Cost of kernels on a GPU: analytic models per family, corrected by measurements."""

from costmodel.gpu.factory import gpu_cost_model

__all__ = ["gpu_cost_model"]
