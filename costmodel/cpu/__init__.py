"""Cost of convolutions on a CPU: its calibration, the roofline model, and a residual learned while tuning."""
