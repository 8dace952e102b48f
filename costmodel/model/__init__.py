"""What a cost model is: estimates, measurements, dispatch by operator, error figures."""
