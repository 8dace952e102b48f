"""Tuning of kernels: the next configuration to measure, the budget of a run, records; and stock MetaSchedule."""
