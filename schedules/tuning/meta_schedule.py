"""Our cost model inside MetaSchedule: a ``PyCostModel`` that ranks the candidates of its evolutionary search.

    model = ResidualModel(RooflineModel(machine, cpu.threads), key=cpu.key)
    kernel = tune_kernel(operator, cpu, CostModelAdapter(model, [operator]), trials=64, directory=records)

See ``examples/meta_schedule_cost_model.py`` for two layers. TVM's own ``tune_tir`` and ``tune_tasks`` accept the
adapter as their ``cost_model``, for workloads of :func:`schedules.contract.operator_workload.workload`.

A candidate of MetaSchedule is determined by a sketch and the decisions of its sampling instructions. They are the
configuration given to the cost model; as its knobs are not those of our templates, the adapter needs a separate
:class:`costmodel.cpu.learned_residual.ResidualModel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from costmodel.base.errors import TuningError
from costmodel.cost_model import Estimate, Measurement
from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_workload import workload
from schedules.contract.template import Config
from schedules.contract.tvm_import import tvm_threads
from schedules.tuning.in_process_measurer import (
    InProcessMeasurer,
    import_tensor_intrinsics,
    log_to_files_only,
)


class PredictingModel(Protocol):
    """Cost model interface of the adapter, e.g. :class:`costmodel.cpu.learned_residual.ResidualModel`."""

    def predict(self, operator: Operator, configs: Sequence[Config]) -> Sequence[Estimate]: ...

    def update(self, measurements: Sequence[Measurement]) -> None: ...

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...


@derived_object
class CostModelAdapter(ms.cost_model.PyCostModel):
    """``model`` as the cost model of MetaSchedule for the workloads of ``operators``.

    The score of a candidate is the reciprocal of its predicted seconds, divided by the best of its batch: 1 is best.
    Workloads of other operators get equal scores. Failed candidates are ignored.
    """

    def __init__(self, model: PredictingModel, operators: Sequence[Operator]) -> None:
        super().__init__()
        self._model = model
        self._operators = {_key(workload(operator)): operator for operator in operators}

    def predict(self, context: ms.TuneContext, candidates: list[Any]) -> np.ndarray:
        """Scores in (0, 1], shape (candidates,), float64."""
        operator = self._operators.get(_key(context.mod))
        if operator is None or not candidates:
            return np.ones(len(candidates))
        estimates = self._model.predict(operator, [knobs(candidate.sch.trace) for candidate in candidates])
        seconds = np.array([max(estimate.seconds, 1e-12) for estimate in estimates])
        return seconds.min() / seconds

    def update(self, context: ms.TuneContext, candidates: list[Any], results: list[Any]) -> None:
        """Train the model on the measured candidates."""
        operator = self._operators.get(_key(context.mod))
        if operator is None:
            return
        self._model.update(
            [
                Measurement(operator, knobs(candidate.sch.trace), float(np.median([float(s) for s in result.run_secs])))
                for candidate, result in zip(candidates, results, strict=True)
                if result.run_secs
            ]
        )

    def save(self, path: str) -> None:
        """Save the model into the directory ``path``."""
        self._model.save(Path(path))

    def load(self, path: str) -> None:
        """Load the model from the directory ``path``."""
        self._model.load(Path(path))


def knobs(trace: Any) -> dict[str, int]:
    """Sketch and all decisions of a schedule's trace, identical in every process that reads a saved model.

    Sketches are numbered by a hash of their instructions, from 0 to 65535; collisions within a workload are rare.
    """
    kinds = "\n".join(instruction.kind.name for instruction in trace.insts)
    return {"sketch": crc32(kinds.encode()) & 0xFFFF, **decisions(trace)}


def decisions(trace: Any) -> dict[str, int]:
    """Sampling decisions of a schedule's trace: tile extents, choices and compute locations as knobs."""
    found: dict[str, int] = {}
    sampling = (instruction for instruction in trace.insts if instruction in trace.decisions)
    for number, instruction in enumerate(sampling):
        decision = trace.decisions[instruction]
        values = decision if hasattr(decision, "__iter__") else [decision]
        for position, value in enumerate(values):
            found[f"decision{number:02}.{position}"] = int(value)
    return found


@dataclass(frozen=True, eq=False)
class MetaScheduleKernel:
    """The best schedule found: ``module`` is scheduled TIR with the function ``main``."""

    module: tvm.IRModule
    seconds: float
    measured: int
    build_failures: int
    run_failures: int


def tune_kernel(
    operator: Operator,
    cpu: CpuTarget,
    cost_model: Any,
    trials: int,
    directory: Path,
    *,
    strategy: Any = "evolutionary",
    batch: int = 16,
) -> MetaScheduleKernel:
    """Tune the workload of ``operator`` with MetaSchedule, with ``cost_model`` (an adapter) ranking its candidates.

    Its records are kept in ``directory``. Raises ``TuningError`` if no candidate runs.
    """
    import_tensor_intrinsics()
    log_to_files_only()
    module, target = workload(operator), cpu.tvm_target()
    directory.mkdir(parents=True, exist_ok=True)
    measurer = InProcessMeasurer()
    with tvm_threads(cpu.threads):
        database = ms.tir_integration.tune_tir(
            module,
            target,
            str(directory),
            trials,
            num_trials_per_iter=min(batch, trials),
            builder=measurer.builder,
            runner=measurer.runner,
            cost_model=cost_model,
            measure_callbacks=measurer.callbacks,
            strategy=strategy,
            num_tuning_cores=cpu.threads,
            seed=0,
        )
    record = database.query_tuning_record(module, target, "main")
    if record is None:
        errors = measurer.build_failures + measurer.run_failures
        raise TuningError(
            f"MetaSchedule found no schedule for {operator}: {errors[-1] if errors else 'no candidate'}; "
            "allow it more trials"
        )
    return MetaScheduleKernel(
        module=database.query_ir_module(module, target, "main"),
        seconds=min(float(seconds) for seconds in record.run_secs),
        measured=measurer.measured,
        build_failures=len(measurer.build_failures),
        run_failures=len(measurer.run_failures),
    )


def _key(module: tvm.IRModule) -> int:
    """Hash of the function only: MetaSchedule adds attributes to the module."""
    return tvm_ffi.structural_hash(module["main"].without_attr("global_symbol").body)
