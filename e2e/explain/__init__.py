"""From a simulated step to its prediction: critical path, phases, intervals, ranks."""
