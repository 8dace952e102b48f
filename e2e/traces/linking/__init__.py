"""Assignment of a profile's device work to operators."""
