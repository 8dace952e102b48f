"""For tests of predictions: models, a cluster and steps whose answers are mental arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from costmodel.cost_model import CostModel, Estimate
from costmodel.machines.machine_file import load_machine
from e2e.explain.predictor import PredictionResult, Setting, predict_graph
from e2e.lowering.lower_trace import lower_step
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor
from e2e.step.options import StepOptions
from tests.e2e.drawn_graphs import Drawing, together

GPU = load_machine("v100-pcie-32gb")


class Toy(CostModel):
    """Every operator takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def estimate(self, operators):
        each = Estimate(self.seconds, 0.9 * self.seconds, 1.2 * self.seconds, "compute", {}, "fitted")
        return [each] * len(operators)


class Table:
    """Every piece of host time takes ``seconds``."""

    def __init__(self, seconds: float = 0.0, factor: float = 1.0) -> None:
        self.each = seconds
        self.factor = factor
        self.level = 1.0

    def seconds(self, kind, name, records=None):
        return self.each


@dataclass(frozen=True)
class ToyCluster:
    """Two GPUs and two network cards in each node."""

    name: str = "toy"
    gpus_per_node: int = 2
    nodes: int = 2
    node_gpus: int = 2
    network_cards: int = 2
    network_assumed: bool = False


class ToyCollectives(CostModel):
    """1 s per 100 bytes, twice as long between nodes; divided among those that share the links."""

    def __init__(self) -> None:
        self.asked: list = []

    def estimate(self, operators):
        self.asked += operators
        return [self._one(each) for each in operators]

    def _one(self, each):
        size = each.size_bytes if each.busiest_bytes is None else each.busiest_bytes
        seconds = size / 100 * (2 if each.nodes > 1 else 1) * each.sharing
        return Estimate(seconds, 0.9 * seconds, 1.1 * seconds, "network", {}, "fitted")


SETTING = Setting(GPU, Table(), ToyCollectives())


def setting(kernel: float, host: float, **options) -> Setting:
    return Setting(GPU, Table(host), Toy(kernel), **options)


def tensor(number: int, *shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(number, number, shape, dtype, "cuda:0")


def step() -> OperatorTrace:
    """A product and a ReLU forward, a product backward, and an operator nobody knows."""
    a, b, c, d = tensor(1, 64, 32), tensor(2, 32, 16), tensor(3, 64, 16), tensor(4, 64, 16)
    calls = (
        OperatorCall(0, "aten::mm", None, 0, (a, b), (c,), "forward"),
        OperatorCall(1, "aten::relu", None, 0, (c,), (d,), "forward"),
        OperatorCall(2, "aten::mm", None, 0, (d, tensor(5, 16, 8)), (tensor(6, 64, 8),), "backward"),
        OperatorCall(3, "mine::secret", None, 0, (d,), (tensor(7, 64, 16),), "optimizer"),
    )
    return OperatorTrace(calls, source="toy <model>")


def predict_step(trace: OperatorTrace, chosen: Setting) -> PredictionResult:
    """One GPU."""
    lowered = lower_step(trace, StepOptions(compile=chosen.compiled))
    return predict_graph(lowered.graph, chosen, ToyCluster(nodes=1), lowered.memory, warnings=lowered.warnings)


def unpriced(graph: ExecutionGraph) -> ExecutionGraph:
    """Without the durations of collectives."""
    ranks = tuple(
        replace(rank, tasks=tuple(replace(t, duration=None) if t.collective else t for t in rank.tasks))
        for rank in graph.ranks
    )
    return replace(graph, ranks=ranks)


def predict_ranks(graph: ExecutionGraph, **options) -> PredictionResult:
    """Drawn ranks on the toy cluster."""
    return predict_graph(unpriced(graph), SETTING, ToyCluster(), collectives=ToyCollectives(), **options)


def reduced(compute: tuple[float, ...], size: int = 400) -> ExecutionGraph:
    """Each rank computes for its time, then all reduce and the host waits for it."""
    drawings = [Drawing(rank) for rank in range(len(compute))]
    for drawing, seconds in zip(drawings, compute, strict=True):
        drawing.kernel("gemm", seconds, launch=0)
        drawing.event(0, 7, 20)
        drawing.collective("nccl", 0, 0, ranks=tuple(range(len(compute))), size=size, launch=0)
        drawing.synchronize(stream=20)
    return together(*drawings)
