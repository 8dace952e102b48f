"""Which GPU holds which part of which embedding table: placements, their costs, and how the best is found.

placement    -> option_costs  -> greedy, local_search, integer_program -> planner (re-ranks by simulation) -> plan
table-wise ...  seconds, bytes   candidates, bounded by bound             step_graph                          plan.json
"""
