"""What the kernels of embedding lookups cost, as arrays over thousands of tables."""
