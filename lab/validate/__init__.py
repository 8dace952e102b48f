"""Predicted against measured times, a module per section of ``python -m lab.validate``."""
