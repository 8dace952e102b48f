"""Tuning records on disk: what was measured, and what failed."""
