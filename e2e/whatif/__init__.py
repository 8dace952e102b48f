"""What-if questions: a step that is known, with one thing or several changed, and what that does to its time."""
