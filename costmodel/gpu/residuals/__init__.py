"""What measurements add to the physics: trees, levels, a few points of one's own."""
