"""Recurrent layers of cuDNN: launches of its standard algorithm.

Per layer and direction one product of all time steps' inputs with the input weights; then for each time step the
product of the state with the recurrent weights and the element-wise kernel of the gates. Backward: the same steps in
reverse order, then the gradients of inputs and weights in one product each (NVIDIA, Optimizing Performance of Recurrent
Neural Networks on GPUs, arXiv 1604.01946). The persistent algorithm, which cuDNN may use for small states, is not
modelled: it is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from costmodel.operators.device_work import Elementwise, Gemm
from e2e.lowering.families.products import product_dtype
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    argument,
    dtype_of,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall

_GATES = (1, 1, 4, 3)
# Index of the first number in the arguments: mode, hidden size, projection, layers, batch first, dropout, train,
# bidirectional.
_FORWARD, _BACKWARD = 6, 10


@dataclass(frozen=True)
class _Network:
    """Sizes of all layers; ``gates``: rows of a weight per hidden unit."""

    steps: int
    batch: int
    width: int
    hidden: int
    gates: int
    layers: int
    directions: int
    dtype: str
    product: str

    def widths(self) -> Iterator[int]:
        """Iterate over the input width of every layer, once per direction."""
        for layer in range(self.layers):
            for _ in range(self.directions):
                yield self.hidden * self.directions if layer else self.width

    def pointwise(self) -> Elementwise:
        """Return the kernel of one time step's gates: reads pre-activations and state, writes state and gates."""
        return Elementwise("fused", self.batch * self.hidden, 2 * self.gates + 1, self.gates + 1, 0, self.dtype)


def _network(call: OperatorCall, context: Context, first: int) -> _Network:
    data = tensor_argument(call, 0)
    mode, hidden, projection, layers, batch_first, _, _, both = (argument(call, first + place) for place in range(8))
    if not isinstance(mode, int) or not isinstance(hidden, int) or not isinstance(layers, int) or projection:
        raise UnforeseenCall
    if len(data.shape) != 3 or not 0 <= mode < len(_GATES):
        raise UnforeseenCall
    steps, batch = (data.shape[1], data.shape[0]) if batch_first else (data.shape[0], data.shape[1])
    product = product_dtype(data, context, context.options.switches.recurrent)
    return _Network(
        steps, batch, data.shape[2], hidden, _GATES[mode], layers, 2 if both else 1, dtype_of(data), product
    )


def _forward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    net = _network(call, context, _FORWARD)
    rows = net.gates * net.hidden
    step = [
        DeviceWork(call.name, (Gemm(1, net.batch, rows, net.hidden, net.product, transpose_b=True),)),
        DeviceWork(call.name, (net.pointwise(),)),
    ]
    work: list[DeviceWork] = []
    for width in net.widths():
        inputs = Gemm(1, net.steps * net.batch, rows, width, net.product, transpose_b=True)
        work += [DeviceWork(call.name, (inputs,)), *step * net.steps]
    return work


def _backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    net = _network(call, context, _BACKWARD)
    rows, all_steps = net.gates * net.hidden, net.steps * net.batch
    step = [
        DeviceWork(call.name, (net.pointwise(),)),
        DeviceWork(call.name, (Gemm(1, net.batch, net.hidden, rows, net.product),)),
    ]
    work: list[DeviceWork] = []
    for width in net.widths():
        work += step * net.steps
        products = (
            Gemm(1, all_steps, width, rows, net.product),
            Gemm(1, rows, width, all_steps, net.product, transpose_a=True),
            Gemm(1, rows, net.hidden, all_steps, net.product, transpose_a=True),
        )
        work += [DeviceWork(call.name, (product,)) for product in products]
    return work


TABLE: dict[str, Lowering] = {"aten::_cudnn_rnn": _forward, "aten::_cudnn_rnn_backward": _backward}
