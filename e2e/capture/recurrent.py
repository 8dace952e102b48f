"""Recurrent layers ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as on CUDA: one cuDNN call forward, one backward.

Without a GPU PyTorch decomposes them into the operators of every time step. Here they are recorded as
``aten::_cudnn_rnn`` and ``aten::_cudnn_rnn_backward`` with the arguments of the profiler's traces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from e2e.capture.recorder import Recorder

# Name of the function -> cuDNN's number of the mode.
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_LSTM = MODES["lstm"]


def recurrent(recorder: Recorder, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the results of ``torch.lstm`` and similar. Packed sequences and projections run operator by operator."""
    if kwargs or len(args) != 9 or not isinstance(args[2], (tuple, list)) or not isinstance(args[3], bool):
        return func(*args, **kwargs)
    data, states, weights, has_bias, layers, dropout, train, bidirectional, batch_first = args
    hidden, cell = states if isinstance(states, (tuple, list)) else (states, None)
    per_layer = (4 if has_bias else 2) * (2 if bidirectional else 1)
    if data.device.type != "meta" or data.dim() != 3 or len(weights) != per_layer * layers:
        return func(*args, **kwargs)
    numbers = (MODES[name], hidden.shape[-1], 0, layers, batch_first, dropout, train, bidirectional)
    output, last, last_cell = CudnnRnn.apply(recorder, numbers, data, hidden, cell, *weights)
    return (output, last, last_cell) if MODES[name] == _LSTM else (output, last)


class CudnnRnn(torch.autograd.Function):
    """cuDNN call on ``data`` (time, batch, width), or batch first; ``hidden`` and ``cell`` (layers x directions, batch,
    hidden).
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        numbers: tuple[Any, ...],
        data: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> Any:
        ctx.recorder, ctx.numbers = recorder, numbers
        ctx.save_for_backward(data, hidden, *weights)
        _, size, _, layers, _, _, _, bidirectional = numbers
        with recorder.paused():
            output = data.new_empty((*data.shape[:2], size * (2 if bidirectional else 1)))
            last = torch.empty_like(hidden)
            last_cell = data.new_empty(0) if cell is None else torch.empty_like(cell)
        inputs = (data, list(weights), len(weights) // layers, None, hidden, cell, *numbers, [], None)
        recorder.record_call("aten::_cudnn_rnn", inputs, (output, last, last_cell), {})
        return output, last, last_cell

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        data, hidden, *weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        with ctx.recorder.paused():
            of_data = torch.empty_like(data) if needs[2] else None
            of_hidden = torch.empty_like(hidden) if needs[3] else None
            of_cell = torch.empty_like(hidden) if needs[4] else None
            of_weights = [torch.empty_like(weight) for weight in weights]
        per_layer = len(weights) // ctx.numbers[3]
        states = (hidden, of_cell, gradients[0], *gradients)
        inputs = (data, weights, per_layer, None, *states, *ctx.numbers, [], None, None)
        outputs = (of_data, of_hidden, of_cell, of_weights)
        ctx.recorder.record_call("aten::_cudnn_rnn_backward", inputs, outputs, {})
        return (None, None, of_data, of_hidden, of_cell, *of_weights)
