"""Before anything is shipped: outputs against double precision, whole networks against each other."""
