"""Ranks of a distributed script, captured on none."""
