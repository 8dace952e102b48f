"""Kernels for CPUs: templates in TIR, their records, how they are measured and tuned."""
