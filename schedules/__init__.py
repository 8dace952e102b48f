"""Kernels for CPUs: specifications, templates with knobs, measurement and tuning. Imports only ``costmodel``."""
