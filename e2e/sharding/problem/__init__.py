"""What a placement of embedding tables costs every rank, and what it holds in memory."""
