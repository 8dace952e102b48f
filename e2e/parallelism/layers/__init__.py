"""The layers of built-in models on one rank: captured, divided among ranks, cut into pieces."""
