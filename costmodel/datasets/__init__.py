"""Readers of public measurements (docs/data.md), their manifest, and the commands' way to find and fetch them."""
