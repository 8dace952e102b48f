"""Analytic models of kernels, one file per kernel family: seconds and features."""
