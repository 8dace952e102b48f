"""Decides which configuration to measure next, and when the budget ends."""
