"""Commands of ``python -m e2e``, and the options that they share."""
