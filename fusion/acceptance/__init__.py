"""What a network must pass before it is shipped: outputs against FP64, and what shorter number types do to them."""
