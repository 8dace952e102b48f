"""From what a user asks to a prepared step: request -> check against the table -> prepare by source -> run.

:func:`e2e.sources.predict_request.predict_request` is the road; a source (:mod:`e2e.sources.registry`) is one file with
the function that prepares its step, :mod:`e2e.sources.asked.option_table` says which options it takes.
"""
