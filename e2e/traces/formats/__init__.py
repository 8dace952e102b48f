"""Readers of profiler files: PyTorch's of every version, and Chakra's."""
