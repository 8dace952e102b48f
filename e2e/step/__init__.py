"""Records of a step: operators, the execution graph, memory, names."""
