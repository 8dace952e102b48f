"""What measurements add to the physics of GPU kernels: trees, levels, a few points of one's own."""
