"""What a network must pass before it is shipped: outputs against FP64, whole networks against each other."""
