"""The section ``vtrain`` of ``python -m lab.validate``: the published GPT iterations of vTrain (Bang et al., MICRO
2024) on A100, predicted.

What the figures of one node are: within one choice of width, micro-batch and parallelism they are bilinear in layers
and micro-batches to the last digit of a double. No measured iteration is; they were put together from
profiles of single layers, as vTrain does, so the prediction here is put together likewise (:class:`Profiler`): FP16, no
recomputation (with it the products alone would need 96 % of the datasheet rate at width 2048 and 8 sequences), plain
cross entropy, one all-reduce of all gradients after the backward pass, Apex' FusedAdam, 1F1B.

Iterations on several nodes cannot have been without recomputation: what 1F1B keeps of 175 billion parameters on 512
GPUs is hundreds of GiB on the first stage. The source's own configurations of them (config/validation/multi) ask for it
(``use_checkpoint``) and give 800 Gb/s between nodes of 8 GPUs. So there every layer is run again in the backward pass,
as Megatron-LM does it, and a node has four HDR cards. Of the published figures of Megatron-LM itself (Narayanan et al.,
arXiv 2104.04473, table 1) this gives 119 instead of 135 TFLOP/s (18.4 billion parameters, 256 GPUs) and 129 instead of
138 (39.1 billion, 512 GPUs); without recomputation it would be 164 and 177.

Assumed: A100 SXM4 40 GB on NVSwitch. Its optimizer moves 22 bytes per parameter at 1.09 TB/s, 70 % of that card's
datasheet bandwidth; of the 80 GB card's it would be 53 %. ``HOST_SECONDS`` is the one constant fitted, on width 1024.

Parts are taken as a profile of single layers shows them: each from a standing start, its time with the gaps of the
host.

vTrain (Bang et al., MICRO 2024) profiles embedding, one layer and head one by one, then puts iterations together from
these times and from a table of all-reduces. A part takes what host and device need for it when neither is ahead;
transfers of tensor parallelism are added, hidden by nothing.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.cost_model import CostModel, Estimate
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.parallelism.pieces import Item, LayerCollective, Part, Pieces, Work
from e2e.parallelism.rewrites import NOTHING, Condenser
from e2e.parallelism.spec import ParallelSpec
from e2e.price.pricing import HostOverheads, duration_of, operator_prices
from e2e.step.execution_graph import CallInfo, Duration, HostWork
from lab.command_line import with_progress
from lab.data.data_folder import BROUGHT, reading
from lab.validate.errors import Accuracy, accuracy, error_table, section_console

FOLDER, FILES = Path("vtrain"), "iteration_times_*.csv"
CLUSTER, NODE_GPUS = "dgx-a100-40gb", 8
NETWORK = "infiniband-hdr:4"
# Host seconds per kernel in the profiled runs: least mean error over the cases of width FITTED_HIDDEN.
HOST_SECONDS, FITTED_HIDDEN = 75e-6, 1024
COLUMNS = 11


@dataclass(frozen=True)
class VtrainCase:
    """One published iteration."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence_length: int
    tp: int
    dp: int
    pp: int
    seconds: float

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one replica in a step."""
        return self.global_batch // self.micro_batch // self.dp

    @property
    def nodes(self) -> int:
        """Number of nodes that hold its GPUs."""
        return -(-self.gpus // NODE_GPUS)

    @property
    def spec(self) -> ParallelSpec:
        """Parallelism of the model."""
        return ParallelSpec(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            micro_batches=self.micro_batches,
            recompute="full" if self.nodes > 1 else "none",
            overlap=False,
        )


@dataclass(frozen=True)
class VtrainReport:
    """All cases with their predicted seconds."""

    cases: Sequence[VtrainCase]
    predicted: Sequence[float]

    @cached_property
    def errors(self) -> np.ndarray:
        """(predicted - published) / published."""
        published = np.array([case.seconds for case in self.cases])
        return np.array(self.predicted) / published - 1

    def figures(self) -> dict[str, Accuracy]:
        """Figures of all cases, by number of GPUs, by parallelism, and of those not fitted on."""
        groups: list[tuple[str, Callable[[VtrainCase], bool]]] = [
            ("all", lambda case: True),
            (f"held out: width other than {FITTED_HIDDEN}", lambda case: case.hidden != FITTED_HIDDEN),
            (f"fitted on: width {FITTED_HIDDEN}", lambda case: case.hidden == FITTED_HIDDEN),
        ]
        for gpus in sorted({case.gpus for case in self.cases}):
            groups.append((f"{gpus} GPUs", lambda case, gpus=gpus: case.gpus == gpus))  # type: ignore[misc]
        for split in sorted({(case.tp, case.dp, case.pp) for case in self.cases}):
            name = "tp={} dp={} pp={}".format(*split)
            groups.append((name, lambda case, split=split: (case.tp, case.dp, case.pp) == split))  # type: ignore[misc]
        found = [(name, np.array([bool(chosen(case)) for case in self.cases])) for name, chosen in groups]
        return {name: self._accuracy(mask) for name, mask in found if mask.any()}

    def _accuracy(self, mask: np.ndarray) -> Accuracy:
        """Errors of the cases where ``mask`` is true; predictions have no interval."""
        places: list[int] = np.flatnonzero(mask).tolist()
        seconds = [self.predicted[place] for place in places]
        estimates = [Estimate(each, each, each, "step", {}, "fitted") for each in seconds]
        return accuracy(estimates, [self.cases[place].seconds for place in places])

    def record(self) -> dict[str, Any]:
        """JSON document of the report."""
        rows = [
            {**asdict(case), "predicted_seconds": seconds, "error": float(error)}
            for case, seconds, error in zip(self.cases, self.predicted, self.errors, strict=True)
        ]
        return {"figures": [{"name": name, **asdict(each)} for name, each in self.figures().items()], "cases": rows}

    def render(self) -> None:
        """Print the error figures, a line for each group of cases."""
        console = section_console()
        console.print("GPT iterations of vTrain on A100 (TP x DP x PP), put together from predicted parts")
        console.print(error_table(("GPT",), [((name,), each) for name, each in self.figures().items()]))
        console.print(
            f"the host's time per kernel is fitted on width {FITTED_HIDDEN}; iterations of one "
            "node are predicted without recomputation, those of several nodes with it",
            soft_wrap=True,
        )


def read_cases(data: Path) -> list[VtrainCase]:
    """Read the published iterations in the folder ``data``, for every number of GPUs; ``InputError`` names the file."""
    paths = sorted((data / FOLDER).glob(FILES))
    if not paths:
        raise InputError(f"{data / FOLDER / FILES}: no such file; {BROUGHT}")
    return [case for path in paths for case in _read(path)]


def _read(path: Path) -> Iterator[VtrainCase]:
    with reading(path, "a table of iterations"), path.open(encoding="utf-8", newline="") as file:
        rows = [_case(row) for row in csv.reader(file) if row and not row[0].startswith("#")]
    yield from rows


def _case(row: list[str]) -> VtrainCase:
    if len(row) != COLUMNS:
        raise ValueError(f"a line has {len(row)} columns instead of {COLUMNS}")
    *counts, milliseconds = row
    names = [each.name for each in fields(VtrainCase)][:-1]
    return VtrainCase(**dict(zip(names, map(int, counts), strict=True)), seconds=float(milliseconds) / 1e3)


def validate(chosen: Sequence[VtrainCase]) -> VtrainReport:
    """Predict every case."""
    predictor = Predictor()
    rows = with_progress(chosen, lambda case: f"{case.gpus} GPUs, width {case.hidden}")
    return VtrainReport(chosen, [predictor.seconds(case) for case in rows])


@dataclass
class Predictor:
    """Iterations from profiles of parts; each profile is made once per width, micro-batch and tensor parallelism."""

    host: float = HOST_SECONDS
    _profiles: dict[Any, Any] = field(default_factory=dict)

    def seconds(self, case: VtrainCase) -> float:
        """Seconds of one iteration from a standing start."""
        from e2e.simulate.simulator import simulate

        return simulate(self.graph(case)).step_seconds

    def graph(self, case: VtrainCase) -> Any:
        """Priced graph of ``case``."""
        from costmodel.collectives import collective_cost_model
        from costmodel.machines.cluster import load_cluster
        from e2e.parallelism.parallel_graph import assemble
        from e2e.price.collective_pricing import price_collectives
        from e2e.price.pricing import price
        from lab.steps.megatron_gpt import fused_adam

        captured, profiler, options = self._profile(case)
        built = assemble(
            captured, case.spec, case.layers, case.micro_batch, fused_adam, options, "vtrain", profiler.items
        )
        cluster = load_cluster(CLUSTER, case.gpus, network=NETWORK)
        priced = price_collectives(built.graph, cluster, collective_cost_model(cluster))
        return price(priced, profiler.model, _Host(0.0))

    def _profile(self, case: VtrainCase) -> Any:
        key = (case.hidden, case.heads, case.sequence_length, case.micro_batch, case.tp)
        if key not in self._profiles:
            self._profiles[key] = self._capture(case)
        return self._profiles[key]

    def _capture(self, case: VtrainCase) -> Any:
        import torch

        from costmodel.collectives import collective_cost_model
        from costmodel.gpu.factory import gpu_cost_model
        from costmodel.machines.cluster import load_cluster
        from e2e.parallelism.pieces import CAPTURED_LAYERS, ModelSource, capture_model
        from e2e.step.options import StepOptions
        from lab.steps import megatron_gpt as megatron

        config = megatron.GptConfig(CAPTURED_LAYERS, case.hidden, case.heads, case.sequence_length, padded=False)
        with torch.device("meta"):
            module = megatron.Gpt(config, case.tp)
        module.half()
        inputs = megatron.inputs(config, case.micro_batch, case.tp)
        shape = (case.micro_batch, case.sequence_length, case.hidden)
        options = StepOptions(dtype="float16")
        captured = capture_model(ModelSource("vtrain", module, module.layers, lambda: module(*inputs), shape), options)
        cluster = load_cluster(CLUSTER, case.tp, network=NETWORK)
        model, collectives = gpu_cost_model(cluster.machine), collective_cost_model(cluster)
        profiler = Profiler(model, _Host(self.host), collectives, case.tp, cluster.nodes)
        return replace(captured, pieces=profiler.pieces(captured.pieces)), profiler, options


@dataclass(frozen=True)
class _Host:
    """Host that takes ``launch_seconds`` per kernel; in a graph of profiled parts it takes no additional time."""

    launch_seconds: float
    factor: float = 1.0
    level: float = 1.0

    def seconds(self, kind: Any, name: str, records: float | None = None) -> float:
        return self.launch_seconds if kind == "T4" else 0.0


# Case name for --only.
CASE = f"{CLUSTER}/vtrain-gpt"


def vtrain_section(data: Path, only: str = "") -> VtrainReport | None:
    """Section of vTrain; ``None`` if ``only`` does not match; ``InputError`` if the table is not in ``data``."""
    if only not in CASE:
        return None
    cases = read_cases(data)
    return validate(cases)


@dataclass
class Profiler:
    """Profiler of parts. ``overheads``: of the profiled host; ``collectives``: prices of transfers among ``tp`` ranks
    on ``nodes`` nodes.
    """

    model: CostModel
    overheads: HostOverheads
    collectives: CostModel
    tp: int
    nodes: int = 1

    def __post_init__(self) -> None:
        self._condenser = Condenser(self.overheads, kernels=1)

    def pieces(self, pieces: Pieces) -> Pieces:
        """All parts of ``pieces``, each as one task. Gradients of later micro-batches cost the same as the
        first ones.
        """

        def parts(given: Mapping[Any, Part]) -> dict[Any, Part]:
            return {
                name: replace(part, items=self._whole(part.items, pieces.calls, str(name)))
                for name, part in given.items()
            }

        backward = parts(pieces.backward)
        forward = parts(pieces.forward)
        return replace(pieces, forward=forward, backward=backward, accumulate=backward, core={}, chosen={}, needed={})

    def items(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """A list of items as one task."""
        return self._whole(items, calls, "optimizer")

    def priced(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo]) -> tuple[Item, ...]:
        """``items`` priced for the host and the kernels separately, as they are profiled."""
        condensed = self._condenser.items(items, calls)
        counts = Counter(operator for item in condensed if isinstance(item, Work) for operator in item.operators)
        (prices,) = operator_prices([counts], self.model)
        return tuple(
            replace(item, duration=duration_of(item, prices)) if isinstance(item, Work) else item for item in condensed
        )

    def _whole(self, items: tuple[Item, ...], calls: Mapping[int, CallInfo], name: str) -> tuple[Item, ...]:
        seconds = standing_start(self.priced(items, calls)) + self._transfers(items)
        duration = Duration(seconds, seconds, seconds, "profile", "fitted")
        call = next((item.call for item in items if isinstance(item, Work)), None)
        return (Work(f"part {name}", "kernel", (), call, duration, NOTHING),)

    def _transfers(self, items: tuple[Item, ...]) -> float:
        wanted = [
            CollectiveTransfer(item.kind, item.size_bytes, self.tp, self.nodes)  # type: ignore[arg-type]
            for item in items
            if isinstance(item, LayerCollective)
        ]
        return sum(estimate.seconds for estimate in self.collectives.estimate(wanted)) if wanted else 0.0


def standing_start(items: tuple[Item, ...]) -> float:
    """Seconds from an idle machine until host and device have finished the priced ``items``, kernels in sequence."""
    host = device = 0.0
    for item in items:
        if isinstance(item, HostWork) and item.duration is not None:
            host += item.duration.seconds
        elif isinstance(item, Work) and item.duration is not None:
            device = max(host, device) + item.duration.seconds
    return max(host, device)
