"""Readers of public measurements (docs/measurements.md), their manifest, and the commands' way to find and fetch them."""
