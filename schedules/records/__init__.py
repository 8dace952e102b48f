"""Tuning records on disk: measurements and failures."""
