"""Predictions as text, HTML, JSON and timelines."""
