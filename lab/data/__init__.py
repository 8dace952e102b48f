"""Readers of public measurements (docs/measurements.md), their manifest, and the way to find and fetch them."""
