"""Measurement of kernels and host overheads on the GPU at hand, or, to test the same code, on a CPU.

Modules that import torch say ``TORCH = True`` at the top; nothing else of ``costmodel`` does.
"""
