"""Which GPU holds which part of which embedding table: placements, their costs, and how the best is found.

problem/ (ways to cut, their costs)  ->  search/ (candidates and a bound)  ->  planner.py (re-ranked by simulation)
"""
