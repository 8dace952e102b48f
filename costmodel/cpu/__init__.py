"""Convolutions on CPUs: calibration, roofline, and the learned correction of kernel times."""
