"""What the measuring suites run: operators, copies, lookups and collectives on real tensors."""
