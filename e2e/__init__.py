"""Step time of training and inference by critical path. Imports ``costmodel`` alone."""
