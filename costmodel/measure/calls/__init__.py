"""Calls timed by the measuring suites: operators, copies, lookups and collectives on real tensors."""
