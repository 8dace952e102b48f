"""Readers of recorded traces: execution traces, Kineto profiles, the two linked, and the graph of a recorded step."""
