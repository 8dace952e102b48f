"""Cost of communication between GPUs once all ranks are ready; excludes waiting for other ranks."""

from costmodel.collectives.collective_model import CollectiveModel, collective_cost_model

__all__ = ["CollectiveModel", "collective_cost_model"]
