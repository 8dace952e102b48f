"""Readers of public measurements (../shared/data); the files stay where they are."""
