"""Sweep over many ways to spread a model over GPUs, predicted in parallel processes and ranked."""
