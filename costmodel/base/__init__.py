"""What every package stands on: errors, units, files written whole, cores, the manners of command lines."""
