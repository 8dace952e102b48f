"""What-if questions: change one or several things of a known step and predict the new step time."""
