"""Event-driven simulation of a priced graph: host threads, streams, links and collectives across ranks."""
