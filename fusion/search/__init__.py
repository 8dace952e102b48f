"""Tunes a network's kernels, and chooses among them and the fusions inside the network."""
