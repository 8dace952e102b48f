"""Web pages that both tools write: one self-contained file each, with charts, that need no network."""
