"""Cost models: their interface and estimates, measurements, dispatch by operator."""
