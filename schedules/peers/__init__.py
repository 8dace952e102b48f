"""Stock MetaSchedule: tuned for comparison, and with our cost model inside."""
