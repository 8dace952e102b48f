"""Kernels for CPUs: what they compute, templates with knobs, measuring and tuning them. Imports ``costmodel`` alone."""
