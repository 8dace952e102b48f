"""Utilities used by every package: errors, units, atomic file writes, core counts, command-line conventions."""
