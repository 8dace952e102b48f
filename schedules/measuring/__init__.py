"""Measures kernels and programs of kernels: built, verified and timed in a process of their own."""
