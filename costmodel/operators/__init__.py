"""Records of operators: what is computed, on which sizes; no cost. To add one: docs/extending.md."""
