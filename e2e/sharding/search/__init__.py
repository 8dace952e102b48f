"""Search for placements of embedding tables, and a lower bound of the step time."""
