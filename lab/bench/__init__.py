"""Commands that produce the figures of README and docs: ``python -m lab.bench.NAME``."""
