"""Roofline analysis of fusion sites on this machine, without measurements, the reasons, and a pass that acts on it."""
