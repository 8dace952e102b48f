"""Predicted against measured, a module per section of ``python -m lab.validate``."""
