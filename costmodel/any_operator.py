"""The union of all operators that cost models price: what :meth:`costmodel.interface.CostModel.estimate` takes."""

from __future__ import annotations

from costmodel.collective_operators import CollectiveTransfer
from costmodel.device_operators import DeviceOperator
from costmodel.operators import Operator

AnyOperator = Operator | DeviceOperator | CollectiveTransfer


def dtype_of(operator: AnyOperator) -> str:
    """Of an operator without one, such as a copy, the empty string."""
    return str(getattr(operator, "dtype", ""))
