"""Which configuration to measure next, until the budget ends."""
