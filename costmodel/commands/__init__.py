"""``python -m costmodel``: the commands."""
