"""Comparison of the tuned network with other engines: alternating timing, and output errors."""
