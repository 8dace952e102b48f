"""Rules that bring to one form what exporters write in many."""
