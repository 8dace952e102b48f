"""Readers of PyTorch's profiles and execution traces, of every version."""
