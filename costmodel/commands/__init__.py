"""The commands of ``python -m costmodel``."""
