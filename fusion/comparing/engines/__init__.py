"""Engines that run a network, ours and its peers, one process each."""
