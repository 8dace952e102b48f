"""Embedding tables as data, and how often a batch touches which of their rows.

indices of a batch          ->  IndexStatistics     popularity.py
a published histogram       ->  IndexStatistics     popularity.py
tables.yaml                 ->  EmbeddingTable      embedding_tables.py

What their lookups cost is in :mod:`costmodel.gpu.families.lookups`, for a planner in :mod:`costmodel.gpu.table_costs`.
"""
