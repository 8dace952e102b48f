"""Kernel templates, one file each, and their table."""
