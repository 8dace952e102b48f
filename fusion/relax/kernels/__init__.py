"""Kernels of operators that no template covers: written once for every shape, not tuned."""
