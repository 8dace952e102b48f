"""``python -m e2e``: the commands."""
