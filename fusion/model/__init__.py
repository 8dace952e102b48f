"""Data model of a network: its convolutions, its fusion sites, and the choice among them."""
