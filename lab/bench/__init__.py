"""The commands behind the figures of README and docs: ``python -m lab.bench.NAME``."""
