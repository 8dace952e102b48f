"""Readers of public measurements (docs/measurements.md), their manifest, and commands to find and fetch them."""
