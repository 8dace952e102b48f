"""Laboratory: fits of shipped models, their validation, public measurements and benchmarks. Not in the wheel.

``python -m lab.data``, ``lab.fit``, ``lab.validate``, ``lab.bench.NAME``; the packages never import it.
"""
