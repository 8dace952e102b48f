"""Fits of everything that is shipped in ``costmodel/calibration``."""
