"""Web pages that both tools write: one self-contained file each, with charts, without network requests."""
