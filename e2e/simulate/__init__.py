"""Runs a priced graph: host threads, streams, links and ranks that meet, event by event."""
