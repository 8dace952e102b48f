"""Which device work belongs to which operator of a profile."""
