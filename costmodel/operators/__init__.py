"""Records of operators: what is computed, on which sizes and dtypes; no cost."""
