"""Times the tuned network beside other engines, in turns, and compares outputs."""
