"""Sharding of embedding tables over GPUs: placements, their costs, and the search for the best one.

placement.py (ways to cut a table)  ->  task.py (what they cost)  ->  step_model.py (step time from loads)
->  local_search.py, scenarios.py, integer_program.py (plans), linear_program.py (a bound)
->  planner.py (re-ranked by simulation)
"""
