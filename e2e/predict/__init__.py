"""From what a user asks to the answer: options -> request -> check against the table -> prepare by source -> run.

:func:`predict_request` is the road; a source (:mod:`e2e.predict.sources`) is one file with the function that prepares
its step, :mod:`e2e.predict.rules` says which options it takes.
"""
