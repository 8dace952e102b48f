"""Capture of a distributed script, rank by rank, in one process and without GPUs."""
