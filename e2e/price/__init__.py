"""Durations for a graph: kernels, collectives, host overheads."""
