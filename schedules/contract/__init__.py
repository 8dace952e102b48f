"""What templates, search and lowering agree on: target, layouts, signatures, the reference."""
