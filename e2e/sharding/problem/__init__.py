"""Costs of placements of embedding tables on every rank, in time and memory."""
