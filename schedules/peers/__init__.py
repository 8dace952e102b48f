"""TVM's own MetaSchedule: tuned for comparison, and with this project's cost model."""
