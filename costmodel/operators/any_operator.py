"""Union of all operators that :meth:`costmodel.model.cost_model.CostModel.estimate` accepts."""

from __future__ import annotations

from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.device_work import DeviceOperator
from costmodel.operators.layers import Operator

AnyOperator = Operator | DeviceOperator | CollectiveTransfer


def dtype_of(operator: AnyOperator) -> str:
    """Dtype of ``operator``; empty for one without, such as a copy."""
    return str(getattr(operator, "dtype", ""))
