"""``python -m fusion``: the commands and what they print."""
