"""Rules that convert the many forms that exporters write to one canonical form."""
