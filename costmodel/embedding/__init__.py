"""Embedding tables: how often a batch touches which rows, what that does to caches, what lookups cost.

indices of a batch, a published histogram, a Zipf exponent  ->  IndexStatistics     statistics.py
tables.yaml                                                 ->  EmbeddingTable      tables.py
tables, batch size, machine                                 ->  TableSeconds        table_costs.py
"""
