"""Recurrent layers: cuDNN's LSTM, GRU and RNN, the fused kernels of linear attention, and CTC's loss over time steps.

cuDNN, its standard algorithm: per layer and direction one product of all time steps' inputs with the input weights;
then for each time step the product of the state with the recurrent weights and the element-wise kernel of the gates.
Backward: the same steps in reverse order, then the gradients of inputs and weights in one product each (NVIDIA,
Optimizing Performance of Recurrent Neural Networks on GPUs, arXiv 1604.01946). The persistent algorithm, which cuDNN
may use for small states, is not modelled: it is faster.

Linear attention (:mod:`e2e.capture.linear_attention`): the kernels of one call follow each other without a gap; the
host time of the later launches is not counted separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from costmodel.operators.attention import CausalConvolution, LinearAttention, LinearKind
from costmodel.operators.device_work import Elementwise, Gemm
from costmodel.operators.lookups import Direction
from e2e.lowering.families.products import product_dtype
from e2e.lowering.families.work import (
    Context,
    DeviceWork,
    Lowering,
    UnforeseenCall,
    argument,
    numel,
    priced_dtype,
    tensor_argument,
)
from e2e.step.operator_trace import OperatorCall, Tensor

_GATES = (1, 1, 4, 3)
# Index of the first number in the arguments: mode, hidden size, projection, layers, batch first, dropout, train,
# bidirectional.
_FORWARD, _BACKWARD = 6, 10


@dataclass(frozen=True)
class _Network:
    """Sizes of all layers; ``gates``: rows of a weight per hidden unit; ``batches``: sequences at each time step."""

    batches: tuple[int, ...]
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

    def pointwise(self, batch: int) -> Elementwise:
        """Return the kernel of one time step's gates: reads pre-activations and state, writes state and gates."""
        return Elementwise("fused", batch * self.hidden, 2 * self.gates + 1, self.gates + 1, 0, self.dtype)


def _network(call: OperatorCall, context: Context, first: int) -> _Network:
    data = tensor_argument(call, 0)
    numbers = (argument(call, first + place) for place in range(9))
    mode, hidden, projection, layers, batch_first, _, _, both, sizes = numbers
    if not isinstance(mode, int) or not isinstance(hidden, int) or not isinstance(layers, int) or projection:
        raise UnforeseenCall
    packed = tuple(each for each in sizes if isinstance(each, int)) if isinstance(sizes, (tuple, list)) else ()
    if len(data.shape) != (2 if packed else 3) or not 0 <= mode < len(_GATES):
        raise UnforeseenCall
    steps, batch = data.shape[:2] if not batch_first else data.shape[1::-1]
    batches = packed or (batch,) * steps
    product = product_dtype(data, context, context.options.switches.recurrent)
    return _Network(
        batches, data.shape[-1], hidden, _GATES[mode], layers, 2 if both else 1, priced_dtype(data), product
    )


def _forward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    net = _network(call, context, _FORWARD)
    rows = net.gates * net.hidden
    steps: list[DeviceWork] = []
    for batch in net.batches:
        product = Gemm(1, batch, rows, net.hidden, net.product, transpose_b=True)
        steps += [DeviceWork(call.name, (product,)), DeviceWork(call.name, (net.pointwise(batch),))]
    work: list[DeviceWork] = []
    for width in net.widths():
        inputs = Gemm(1, sum(net.batches), rows, width, net.product, transpose_b=True)
        work += [DeviceWork(call.name, (inputs,)), *steps]
    return work


def _backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    net = _network(call, context, _BACKWARD)
    rows, all_steps = net.gates * net.hidden, sum(net.batches)
    steps: list[DeviceWork] = []
    for batch in reversed(net.batches):
        product = Gemm(1, batch, net.hidden, rows, net.product)
        steps += [DeviceWork(call.name, (net.pointwise(batch),)), DeviceWork(call.name, (product,))]
    work: list[DeviceWork] = []
    for width in net.widths():
        work += steps
        products = (
            Gemm(1, all_steps, width, rows, net.product),
            Gemm(1, rows, width, all_steps, net.product, transpose_a=True),
            Gemm(1, rows, net.hidden, all_steps, net.product, transpose_a=True),
        )
        work += [DeviceWork(call.name, (product,)) for product in products]
    return work


def _cell(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the fused kernel of an LSTM's or a GRU's cell: every tensor once, in sizes of a state."""
    results = [each for each in call.outputs if isinstance(each, Tensor)]
    state = min(results, key=numel)
    read = sum(numel(each) for each in call.inputs if isinstance(each, Tensor) and len(each.shape) == len(state.shape))
    size = max(numel(state), 1)
    written = sum(map(numel, results))
    kernel = Elementwise("fused", size, round(read / size), round(written / size), 0, priced_dtype(state))
    return [DeviceWork(call.name, (kernel,))]


def _ctc_steps(call: OperatorCall, alphas: Tensor) -> DeviceWork:
    """Return the kernel of CTC's sums (batch, time, states), which goes from one time step to the next."""
    batch, steps, states = alphas.shape
    step = Elementwise("fused", max(batch * states, 1), 3, 1, 0, priced_dtype(alphas))
    return DeviceWork(call.name, (step,) * steps)


def _ctc_loss(call: OperatorCall, context: Context) -> list[DeviceWork]:
    alphas = call.outputs[1]
    if not isinstance(alphas, Tensor) or len(alphas.shape) != 3:
        raise UnforeseenCall
    return [_ctc_steps(call, alphas)]


def _ctc_loss_backward(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower the sums from the end, and the gradients of all time steps by them."""
    log_probs, alphas = tensor_argument(call, 1), tensor_argument(call, 3)
    if len(alphas.shape) != 3:
        raise UnforeseenCall
    gradients = Elementwise("fused", max(numel(log_probs), 1), 2, 1, 0, priced_dtype(log_probs))
    return [_ctc_steps(call, alphas), DeviceWork(call.name, (gradients,))]


_CELLS = ("lstm_cell", "lstm_cell_backward", "gru_cell", "gru_cell_backward")
TABLE: dict[str, Lowering] = {
    "aten::_cudnn_rnn": _forward,
    "aten::_cudnn_rnn_backward": _backward,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": _ctc_loss_backward,
    **{f"aten::_thnn_fused_{name}": _cell for name in _CELLS},
}


_CHUNK = 64  # of Mamba 1's kernel, which has no visible chunks


def _convolution(direction: Direction, update: bool = False) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        data, weight = tensor_argument(call, first), tensor_argument(call, first + 1)
        batch, channels = data.shape[:2]
        length = data.shape[2] if len(data.shape) > 2 else 1
        record = CausalConvolution(
            batch, channels, length, weight.shape[-1], priced_dtype(data), direction, update and length == 1
        )
        return [DeviceWork(call.name, (record,))]

    return lower


def _linear(direction: Direction) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        key, value = tensor_argument(call, first + 1), tensor_argument(call, first + 2)
        how = first + (5 if direction == "forward" else 4)
        kind, chunk, keeps = (argument(call, how + place) for place in range(3))
        batch, length, heads, width = value.shape
        states = argument(call, 4) if direction == "forward" else None
        record = LinearAttention(
            cast(LinearKind, kind), batch, length, key.shape[-2], key.shape[-1], heads, width,
            int(chunk) if isinstance(chunk, int) else _CHUNK, priced_dtype(value), direction, bool(keeps),
            priced_dtype(states) if isinstance(states, Tensor) else "float32",
        )  # fmt: skip
        return [DeviceWork(call.name, (record,))]

    return lower


def _selective(direction: Direction) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        first = 1 if direction == "backward" else 0
        data, decay = tensor_argument(call, first), tensor_argument(call, first + 2)
        batch, channels, length = data.shape
        record = LinearAttention(
            "selective", batch, length, 1, decay.shape[-1], channels, 1, _CHUNK, priced_dtype(data), direction
        )
        return [DeviceWork(call.name, (record,))]

    return lower


def _update(call: OperatorCall, context: Context) -> list[DeviceWork]:
    """Lower a state update: states (batch, channels, states) for Mamba 1, (batch, heads, width, states) for Mamba 2."""
    data, states = tensor_argument(call, 0), tensor_argument(call, 1)
    heads, width = states.shape[1], states.shape[2] if len(states.shape) > 3 else 1
    record = LinearAttention(
        "ssd", states.shape[0], 1, 1, states.shape[-1], heads, width, _CHUNK, priced_dtype(data), "forward", True,
        priced_dtype(states),
    )  # fmt: skip
    return [DeviceWork(call.name, (record,))]


def _norm(reads: int, writes: int) -> Lowering:
    def lower(call: OperatorCall, context: Context) -> list[DeviceWork]:
        data = tensor_argument(call, 0)
        record = Elementwise("gated_norm", numel(data), reads, writes, data.shape[-1], priced_dtype(data))
        return [DeviceWork(call.name, (record,))]

    return lower


LINEAR_ATTENTION_TABLE: dict[str, Lowering] = {
    "scan::causal_conv": _convolution("forward"),
    "scan::causal_conv_backward": _convolution("backward"),
    "scan::causal_conv_update": _convolution("forward", update=True),
    "scan::linear_attention": _linear("forward"),
    "scan::linear_attention_backward": _linear("backward"),
    "scan::selective": _selective("forward"),
    "scan::selective_backward": _selective("backward"),
    "scan::selective_update": _update,
    "scan::gated_norm": _norm(2, 1),
    "scan::gated_norm_backward": _norm(3, 2),
}
