"""Advice: predictions of other settings of a step, and the largest batch that fits."""
