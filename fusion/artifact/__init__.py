"""Build folder written by ``tune``, and execution of its modules."""
