"""The kernels of embedding lookups."""
