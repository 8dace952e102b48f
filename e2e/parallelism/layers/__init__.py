"""Layers of built-in models on one rank: captured, divided, cut into pieces."""
