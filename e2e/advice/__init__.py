"""What to change: other settings of a step, predicted; the largest batch that fits."""
