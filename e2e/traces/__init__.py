"""Readers of recorded traces: execution traces, profiles, links between the two, and the graph of a recorded step."""
