"""Corrections of the analytic models of GPU kernels by measurements: trees, levels, adaptations to a few points."""
