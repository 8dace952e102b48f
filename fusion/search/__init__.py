"""Tuning of a network's kernels, and selection of kernels and fusions inside the network."""
