"""The tuned network beside other engines, in turns."""
