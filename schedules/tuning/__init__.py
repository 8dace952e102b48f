"""Selection of the next configuration to measure, and budget of a tuning run."""
