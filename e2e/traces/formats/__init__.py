"""Reads the files that profilers write, PyTorch's of every version and Chakra's, as records."""
