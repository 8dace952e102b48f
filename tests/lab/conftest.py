"""Fixtures of the cost model's tests: the toy machines, and none of the user's own."""

from tests.costmodel.conftest import toy, toy_gpu, user_machines, vector_toy

__all__ = ["toy", "toy_gpu", "user_machines", "vector_toy"]
