"""ONNX's LSTM and GRU in NumPy, in whatever precision their operands have, in both directions.

ONNX's own reference takes one direction alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

# (inputs to the gates, hidden state, cell state) -> (hidden state, cell state)
Step = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class LSTM(OpRun):
    """Gates in the order input, output, forget, cell."""

    def _run(  # the order and names of the operator's inputs and attributes
        self,
        data: np.ndarray,
        weight: np.ndarray,
        recurrent: np.ndarray,
        bias: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        state: np.ndarray | None = None,
        cell: np.ndarray | None = None,
        peepholes: np.ndarray | None = None,
        direction: str | None = None,
        layout: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        _require_plain(others, lengths, peepholes, ("sigmoid", "tanh", "tanh"))

        def step_of(index: int) -> Step:
            own = recurrent[index]
            added = 0.0 if bias is None else bias[index].reshape(2, -1)[1]

            def step(inputs: np.ndarray, hidden: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                opened, shown, kept, value = np.split(inputs + hidden @ own.T + added, 4, axis=-1)
                after = _sigmoid(kept) * before + _sigmoid(opened) * np.tanh(value)
                return _sigmoid(shown) * np.tanh(after), after

            return step

        return _run_directions(data, weight, bias, (state, cell), recurrent.shape[2], step_of, direction, layout)


class GRU(OpRun):
    """Gates in the order update, reset, hidden."""

    def _run(  # as above
        self,
        data: np.ndarray,
        weight: np.ndarray,
        recurrent: np.ndarray,
        bias: np.ndarray | None = None,
        lengths: np.ndarray | None = None,
        state: np.ndarray | None = None,
        direction: str | None = None,
        layout: int | None = None,
        linear_before_reset: int | None = None,
        **others: Any,
    ) -> tuple[np.ndarray, ...]:
        _require_plain(others, lengths, None, ("sigmoid", "tanh"))

        def step_of(index: int) -> Step:
            update_weight, reset_weight, hidden_weight = np.split(recurrent[index], 3)
            added = np.zeros((3, 1)) if bias is None else bias[index].reshape(2, 3, -1)[1]

            def step(inputs: np.ndarray, hidden: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
                to_update, to_reset, to_hidden = np.split(inputs, 3, axis=-1)
                update = _sigmoid(to_update + hidden @ update_weight.T + added[0])
                reset = _sigmoid(to_reset + hidden @ reset_weight.T + added[1])
                if linear_before_reset:
                    inner = reset * (hidden @ hidden_weight.T + added[2])
                else:
                    inner = (reset * hidden) @ hidden_weight.T + added[2]
                return (1.0 - update) * np.tanh(to_hidden + inner) + update * hidden, before

            return step

        return _run_directions(data, weight, bias, (state, None), recurrent.shape[2], step_of, direction, layout)[:2]


def _require_plain(
    others: dict[str, Any], lengths: np.ndarray | None, peepholes: np.ndarray | None, activations: tuple[str, ...]
) -> None:
    given = tuple(each.lower() for each in others.get("activations") or ())
    plain = not given or given in (activations, activations * 2)
    if lengths is not None or peepholes is not None or not plain or others.get("clip") or others.get("input_forget"):
        raise NotImplementedError("a recurrent layer of another form")


def _run_directions(
    data: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None,
    states: tuple[np.ndarray | None, np.ndarray | None],
    size: int,
    step_of: Callable[[int], Step],
    direction: str | None,
    layout: int | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, of ``size`` units, of every step, and the last hidden and cell state, as ONNX lays them out."""
    steps_first = data.swapaxes(0, 1) if layout else data
    steps, batch = steps_first.shape[:2]
    every, last, last_cells = [], [], []
    for index in range(weight.shape[0]):
        hidden, cell = (
            np.zeros((batch, size), data.dtype) if given is None else (given.swapaxes(0, 1) if layout else given)[index]
            for given in states
        )
        inputs = steps_first @ weight[index].T
        if bias is not None:
            inputs = inputs + bias[index].reshape(2, -1)[0]
        step, found = step_of(index), np.empty((steps, batch, size), data.dtype)
        backwards = direction == "reverse" or index == 1
        for at in range(steps)[::-1] if backwards else range(steps):
            hidden, cell = step(inputs[at], hidden, cell)
            found[at] = hidden
        every.append(found)
        last.append(hidden)
        last_cells.append(cell)
    results = np.stack(every, axis=1), np.stack(last), np.stack(last_cells)
    if not layout:
        return results
    return results[0].transpose(2, 0, 1, 3), results[1].swapaxes(0, 1), results[2].swapaxes(0, 1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
