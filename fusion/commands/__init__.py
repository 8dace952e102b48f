"""Commands of ``python -m fusion`` and their output."""
