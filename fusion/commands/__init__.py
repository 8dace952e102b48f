"""The commands of ``python -m fusion`` and what they print."""
