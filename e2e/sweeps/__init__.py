"""Many requests predicted: ways to spread a model over GPUs, in parallel processes and ranked; advice on one step."""
