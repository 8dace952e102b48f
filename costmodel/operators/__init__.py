"""Operator records: the computation and its sizes, no cost. To add one: docs/extending.md."""
