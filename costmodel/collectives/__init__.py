"""What communication between GPUs costs: :func:`collective_cost_model`."""

from costmodel.collectives.collective_model import CollectiveModel, collective_cost_model

__all__ = ["CollectiveModel", "collective_cost_model"]
