"""Which GPU holds which part of which embedding table: placements, their costs, and how the best is found."""
