"""Measurement of kernels and host overheads on a local GPU, or, to test the same code, on a CPU.

Modules that import torch set ``TORCH = True`` at the top; no other module of ``costmodel`` imports it.
"""
