"""A network as records: its convolutions, the sites that could be fused, and the choice among them."""
