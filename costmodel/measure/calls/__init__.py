"""What the suites run: operators, copies, lookups, collectives on real tensors."""
