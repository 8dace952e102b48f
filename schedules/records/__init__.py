"""Tuning records on disk."""
