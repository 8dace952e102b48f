"""Cost of the kernels of embedding lookups, as arrays over thousands of tables."""
