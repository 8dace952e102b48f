"""Kernel seconds of the dense part of a DLRM from the widths of its MLPs, for the planner; host time excluded.

``predict`` captures the model itself (:mod:`e2e.sharding.dense_model`); a plan only needs the time that its exchanges
can overlap with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodel.base.errors import InputError
from costmodel.embedding.embedding_tables import EmbeddingTable
from costmodel.model.cost_model import CostModel
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Elementwise, Gemm, Loss, OptimizerStep, Rearrangement, Reduction
from e2e.sharding.problem.task import DensePart
from e2e.sharding.problem.transfers import TransferTimes


@dataclass(frozen=True)
class DenseModel:
    """Widths of the MLPs, as in ``DlrmConfig``.

    Vectors are multiplied pairwise if all have the same width, otherwise concatenated.
    """

    # Widths from the dense features to the embedding width.
    bottom: tuple[int, ...]
    # Hidden widths and the output width.
    top: tuple[int, ...]

    def interacts(self, tables: Sequence[EmbeddingTable]) -> bool:
        """True if the model has a dot interaction."""
        return all(table.dim == self.bottom[-1] for table in tables)

    def top_widths(self, tables: Sequence[EmbeddingTable]) -> tuple[int, ...]:
        """Return the widths of the top MLP, input width included."""
        vectors = len(tables) + 1
        if self.interacts(tables):
            return (self.bottom[-1] + vectors * (vectors - 1) // 2, *self.top)
        return (self.bottom[-1] + sum(table.dim for table in tables), *self.top)


def read_dense_model(model: Mapping[str, Any]) -> DenseModel | None:
    """Parse the ``model`` part of ``tables.yaml``; ``None`` if it is absent, raises ``InputError`` if it is invalid."""
    if not model:
        return None
    if set(model) != {"bottom", "top"}:
        raise InputError(f"model: needs bottom and top, widths of the MLPs; has {', '.join(map(str, model))}")
    for name, least in (("bottom", 2), ("top", 1)):
        widths = model[name]
        if not isinstance(widths, list) or len(widths) < least or not all(_is_width(width) for width in widths):
            raise InputError(f"model.{name}: needs a list of at least {least} widths above zero, such as [512, 64]")
    return DenseModel(tuple(model["bottom"]), tuple(model["top"]))


def _is_width(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def dense_part(
    model: DenseModel, tables: Sequence[EmbeddingTable], batch: int, gpu: CostModel, times: TransferTimes
) -> DensePart:
    """Return the dense part in FP32 with SGD; gradients are all-reduced by DDP once per MLP."""
    top = model.top_widths(tables)
    elements, top_elements = _parameters(model.bottom), _parameters(top)
    forward, backward = _interaction(model, tables, batch)

    def seconds(records: Sequence[AnyOperator]) -> float:
        return sum(estimate.seconds for estimate in gpu.estimate(records)) if records else 0.0

    activations = batch * (sum(model.bottom) + sum(top)) * 2
    return DensePart(
        bottom_forward=seconds(_mlp_forward(model.bottom, batch)),
        top_forward=seconds([*forward, *_mlp_forward(top, batch), Loss("bce", batch, 1)]),
        top_backward=seconds([Loss("bce", batch, 1, direction="backward"), *_mlp_backward(top, batch, True)]),
        interaction_backward=seconds(backward),
        bottom_backward=seconds(_mlp_backward(model.bottom, batch, False)),
        optimizer=seconds([OptimizerStep("sgd", elements + top_elements, 2, 2, 1)]),
        top_all_reduce=float(times.of("all_reduce", top_elements * 4)),
        bottom_all_reduce=float(times.of("all_reduce", elements * 4)),
        memory_bytes=(2 * (elements + top_elements) + activations) * 4,
    )


def _parameters(widths: Sequence[int]) -> int:
    return sum((before + 1) * after for before, after in zip(widths, widths[1:], strict=False))


def _mlp_forward(widths: Sequence[int], batch: int) -> list[AnyOperator]:
    records: list[AnyOperator] = []
    for before, after in zip(widths, widths[1:], strict=False):
        records += [Gemm(1, batch, after, before, transpose_b=True, bias=True), Elementwise("relu", batch * after)]
    return records


def _mlp_backward(widths: Sequence[int], batch: int, to_input: bool) -> list[AnyOperator]:
    """Operators of the gradients of weights, biases and inputs; those of the first layer's input only if needed."""
    records: list[AnyOperator] = []
    layers = list(zip(widths, widths[1:], strict=False))
    for place, (before, after) in reversed(list(enumerate(layers))):
        records += [
            Elementwise("threshold_backward", batch * after, 2),
            Gemm(1, after, before, batch, transpose_a=True),
            Reduction("sum", batch * after, after, contiguous=False),
        ]
        if place > 0 or to_input:
            records.append(Gemm(1, batch, before, after))
    return records


def _interaction(
    model: DenseModel, tables: Sequence[EmbeddingTable], batch: int
) -> tuple[list[AnyOperator], list[AnyOperator]]:
    """Operators of the interaction, forward and backward."""
    vectors, width = len(tables) + 1, model.bottom[-1]
    together = batch * model.top_widths(tables)[0]
    if not model.interacts(tables):
        joined = Rearrangement("concat", together, width, inputs=vectors)
        return [joined], [Rearrangement("split", together, width)]
    stacked, pairs = batch * vectors * width, batch * vectors * (vectors - 1) // 2
    product = Gemm(batch, vectors, vectors, width, transpose_b=True)
    gradient = Gemm(batch, vectors, width, vectors)
    forward: list[AnyOperator] = [
        Rearrangement("concat", stacked, width, inputs=2),
        product,
        Rearrangement("index", pairs),
        Rearrangement("concat", together, width, inputs=2),
    ]
    backward: list[AnyOperator] = [
        Rearrangement("scatter", batch * vectors * vectors),
        gradient,
        gradient,
        Elementwise("add", stacked, 2),
    ]
    return forward, backward
