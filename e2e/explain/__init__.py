"""Analysis of a simulated step: critical path, phases, intervals, ranks, collectives."""
