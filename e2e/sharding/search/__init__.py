"""Searches for placements of embedding tables, and the bound that none can beat."""
