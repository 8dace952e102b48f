"""Compares predictions with what was measured: ``python -m e2e validate``."""
