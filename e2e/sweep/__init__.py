"""Many predictions at once: GPUs, their number and the way a model is spread over them, ranked."""
