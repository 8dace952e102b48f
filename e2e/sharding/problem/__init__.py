"""What a placement of embedding tables costs and holds."""
