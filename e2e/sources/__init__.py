"""Pipeline from the user's options to a prepared step: options -> request of one source -> prepare -> run.

The entry point is :func:`e2e.sources.predict_request.predict_request`. A source is a class derived from
:class:`e2e.sources.requests.Request` (those of this project: :mod:`e2e.sources.requests`) with its options and the
function that prepares its step.
"""
