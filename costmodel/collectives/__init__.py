"""What communication between GPUs costs once all ranks are there; waiting for them is no part of it."""

from costmodel.collectives.collective_model import CollectiveModel, collective_cost_model

__all__ = ["CollectiveModel", "collective_cost_model"]
