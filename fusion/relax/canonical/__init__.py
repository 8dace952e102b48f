"""Rules that bring what exporters write to one form."""
