"""Which sites are worth one kernel on this machine, and why."""
