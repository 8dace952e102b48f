"""Shows predictions as text, HTML, JSON and timelines; seconds and bytes become units for people here."""
