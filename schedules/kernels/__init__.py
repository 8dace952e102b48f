"""Kernel templates, a file per kind of layer, and their table; those of several layers in ``fused``."""
