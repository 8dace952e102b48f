"""What operators launch on a GPU, one file per family of operators, each with its ``TABLE``."""
