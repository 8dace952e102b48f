"""Embedding tables as data, and how often a batch touches which of their rows.

indices of a batch          ->  IndexStatistics     index_batches.py, popularity_fit.py
a published histogram       ->  IndexStatistics     reuse_histograms.py
tables.yaml                 ->  EmbeddingTable      embedding_tables.py

What their lookups cost is in :mod:`costmodel.gpu.lookups`, for a planner in :mod:`costmodel.gpu.table_costs`.
"""
