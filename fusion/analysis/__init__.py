"""Roofline analysis of fusion sites on this machine, without measurements, and the reasons."""
