"""Device work of operators, one file per family, each with its ``TABLE``."""
