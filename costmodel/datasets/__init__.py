"""Readers of public measurements (docs/data.md); the files stay where they are."""
