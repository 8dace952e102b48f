"""Output of predictions as text, HTML, JSON and timelines; seconds and bytes are converted to readable units here."""
