"""What templates, search and lowering agree on: CPU, layouts, signatures, and the reference in NumPy."""
