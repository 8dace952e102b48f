"""Pricing: durations of all kernels, collectives and host work of a graph."""
