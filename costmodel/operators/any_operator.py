"""The union of all operators that cost models price: what :meth:`costmodel.model.cost_model.CostModel.estimate`
takes.
"""

from __future__ import annotations

from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.device_work import DeviceOperator
from costmodel.operators.layers import Operator

AnyOperator = Operator | DeviceOperator | CollectiveTransfer


def dtype_of(operator: AnyOperator) -> str:
    """Of an operator without one, such as a copy, the empty string."""
    return str(getattr(operator, "dtype", ""))
