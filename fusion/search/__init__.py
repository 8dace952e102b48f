"""Tuning of a network's kernels, and the choice among them inside the network."""
