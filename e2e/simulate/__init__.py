"""The discrete-event simulation of host threads, streams, links and ranks that meet."""
