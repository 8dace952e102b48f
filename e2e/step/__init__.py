"""Records of a step: operators, the execution graph, phases, memory, names of collectives."""
