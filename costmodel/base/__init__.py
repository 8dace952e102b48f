"""What everything stands on: errors, units, whole files, cores, the command line's manners."""
