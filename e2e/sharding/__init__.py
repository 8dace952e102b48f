"""Sharding of embedding tables over GPUs: placements, their costs, and the search for the best one.

problem/ (options and their costs)  ->  search/ (candidates and a bound)  ->  planner.py (re-ranked by simulation)
"""
