"""Interfaces shared by templates, search and lowering: CPU, layouts, signatures, and the NumPy reference."""
