"""Reads recorded traces: execution traces, profiles, the two linked, and the graph of a recorded step."""
