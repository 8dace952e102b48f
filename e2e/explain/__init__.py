"""What a simulated step says: critical path, phases, intervals, ranks, collectives."""
