"""Templates of several layers in one kernel."""
