"""Kernel templates, one file each, and the table of them."""
