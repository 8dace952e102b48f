"""Engines that run a network: ours, its peers, one process each."""
