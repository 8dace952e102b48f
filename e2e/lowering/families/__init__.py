"""One file per family of operators: the device work of a call."""
