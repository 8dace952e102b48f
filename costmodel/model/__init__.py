"""What a cost model is: its interface and estimates, measurements, dispatch by operator."""
