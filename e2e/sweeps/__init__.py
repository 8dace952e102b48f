"""Many ways to spread a model over GPUs, predicted in processes and ranked."""
