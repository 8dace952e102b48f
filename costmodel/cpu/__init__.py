"""What convolutions cost on a CPU: its calibration, the roofline, and the correction that is learned while tuning."""
