"""Layers of built-in models on one rank: captured, divided among ranks, split into parts."""
