"""From what a user asks to a prepared step: options -> request of one source -> prepare -> run.

:func:`e2e.sources.predict_request.predict_request` is the road. A source is a record that derives from
:class:`e2e.sources.request.Request` (those of this project: :mod:`e2e.sources.known_requests`) with its options and
the function that prepares its step.
"""
