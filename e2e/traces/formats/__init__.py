"""Files that profilers write, as records."""
