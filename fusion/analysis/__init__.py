"""Which sites are worth one kernel on this machine by the roofline, and why; nothing is measured."""
