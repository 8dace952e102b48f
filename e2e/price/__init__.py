"""Gives every kernel, collective and piece of host work of a graph its duration."""
