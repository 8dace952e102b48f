"""Finds out which device work of a profile belongs to which operator."""
