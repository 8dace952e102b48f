"""Measurement of kernels and kernel programs: built, verified and timed in a separate process."""
