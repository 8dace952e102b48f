"""A network's kernels on buffers as in the network: separate weights, reused buffers of intermediates.

All other layers run between two runs of a layer. So its weights come from the cache level that holds the model, its
input from the caches of the cores that wrote it: the time of a kernel differs from its time alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Signature, Template, TensorSpec, numpy_dtype
from schedules.measuring.kernel_verification import input_tensor, random_parameters, tensor_over
from schedules.measuring.timing_protocol import KernelProgram, KernelStep, MeasureOutcome

_ALIGNMENT = 64  # alignment of TVM's allocations
# A free buffer is used for a tensor smaller by at most this factor, as in TVM's memory planner.
_WASTE = 16
WARMUP_RUNS = 2


@dataclass
class LoadedProgram:
    """A program with its arguments. ``overheads``: seconds of each call without any work."""

    functions: Sequence[Callable[..., object]]
    overheads: Sequence[float]
    arguments: list[tuple[Any, ...]] = field(default_factory=list)
    _blocks: list[np.ndarray] = field(default_factory=list)

    def sample(self, runs: int, before: Callable[[], None] = lambda: None) -> None:
        """Run the whole ``runs`` times after a warm-up; store the median of each step.

        ``before`` is called before every run.
        """
        block = []
        for _ in range(WARMUP_RUNS + runs):
            before()
            block.append(self._run())
        self._blocks.append(np.median(block[WARMUP_RUNS:], axis=0))

    def outcome(self) -> MeasureOutcome:
        """Minimum of the medians of each step (the undisturbed round), and likewise of the whole."""
        totals = [float(block.sum()) for block in self._blocks]
        steps = tuple(float(seconds) for seconds in np.min(self._blocks, axis=0))
        return MeasureOutcome(min(totals), None, "", median(totals), len(totals), steps)

    def _run(self) -> np.ndarray:
        clock = time.perf_counter
        marks = [clock()]
        for function, arguments in zip(self.functions, self.arguments, strict=True):
            function(*arguments)
            marks.append(clock())
        return np.maximum(np.diff(marks) - self.overheads, 1e-9)


class ProgramBuffers:
    """Buffers of several programs.

    Intermediates of all programs share one arena; equal layers share their weights, which are kept for programs loaded
    later.
    """

    def __init__(self, templates: Callable[[Operator, CpuTarget], Template | None], cpu: CpuTarget) -> None:
        self._templates = templates
        self._cpu = cpu
        self._capacities: list[int] = []
        # By operator, template (which defines the layout of weights) and layer.
        self._constants: dict[tuple[Operator, str, int], tuple[Any, ...]] = {}
        self._packed: dict[tuple[Operator, str], list[np.ndarray]] = {}
        self._inputs: dict[tuple[Operator, str], Any] = {}
        self._pending: list[tuple[LoadedProgram, KernelProgram, list[Signature], list[int]]] = []

    def load(
        self, program: KernelProgram, functions: Sequence[Callable[..., object]], overhead: Callable[[int], float]
    ) -> LoadedProgram:
        """Plan the buffers of ``program``; :meth:`allocate` creates them."""
        signatures = [self._template(step).signature(step.candidate[0], self._cpu) for step in program]
        slots = plan_buffers([signature.output.size_bytes for signature in signatures], last_uses(program))
        for slot, signature in zip(slots, signatures, strict=True):
            self._capacities += [0] * (slot + 1 - len(self._capacities))
            self._capacities[slot] = max(self._capacities[slot], signature.output.size_bytes)
        loaded = LoadedProgram(functions, [overhead(len(signature.arguments)) for signature in signatures])
        self._pending.append((loaded, program, signatures, slots))
        return loaded

    @property
    def kept_bytes(self) -> int:
        """Memory of the kept weights in bytes."""
        sizes = {key: sum(array.nbytes for array in packed) for key, packed in self._packed.items()}
        return sum(sizes.values()) + sum(sizes[operator, family] for operator, family, _ in self._constants)

    def allocate(self) -> None:
        """Create the arena and the arguments of all loaded programs."""
        arena = [np.zeros(capacity + _ALIGNMENT, np.uint8) for capacity in self._capacities]
        for loaded, program, signatures, slots in self._pending:
            outputs = [_view(arena[slot], signature.output) for slot, signature in zip(slots, signatures, strict=True)]
            loaded.arguments = list(self._arguments(program, signatures, outputs))
        self._pending.clear()
        self._capacities.clear()

    def _arguments(self, program: KernelProgram, signatures: Sequence[Signature], outputs: Sequence[Any]) -> Any:
        occurrences: Counter[Operator] = Counter()
        for step, signature, output in zip(program, signatures, outputs, strict=True):
            operator = step.candidate[0]
            data = self._source(step.data, operator, "data", signature.data, signatures, outputs)
            constants = self._weights(operator, occurrences[operator], self._template(step))
            occurrences[operator] += 1
            gate: tuple[Any, ...] = ()
            if signature.gate is not None:
                gate = (self._source(step.gate, operator, "gate", signature.gate, signatures, outputs),)
            residual: tuple[Any, ...] = ()
            if signature.residual is not None:
                source = self._source(step.residual, operator, "residual", signature.residual, signatures, outputs)
                residual = (source,)
            yield (data, *gate, *constants, *residual, output)

    def _source(
        self,
        index: int | None,
        operator: Operator,
        name: str,
        spec: TensorSpec,
        signatures: Sequence[Signature],
        outputs: Sequence[Any],
    ) -> Any:
        """Output of step ``index`` if it has the layout of ``spec``; otherwise a separate tensor."""
        if index is not None and signatures[index].output == spec:
            return outputs[index]
        if (operator, name) not in self._inputs:
            self._inputs[operator, name] = input_tensor(_shape(operator, name), spec, self._cpu)
        return self._inputs[operator, name]

    def _weights(self, operator: Operator, occurrence: int, template: Template) -> tuple[Any, ...]:
        import tvm

        key = (operator, template.family, occurrence)
        if key not in self._constants:
            packed = (operator, template.family)
            if packed not in self._packed:
                parameters = random_parameters(operator, np.random.default_rng(0))
                self._packed[packed] = template.pack(operator, parameters, self._cpu)
            self._constants[key] = tuple(tvm.runtime.tensor(array) for array in self._packed[packed])
        return self._constants[key]

    def _template(self, step: KernelStep) -> Template:
        operator, config = step.candidate
        template = self._templates(operator, self._cpu)
        assert template is not None, "the program was compiled with it"
        return template.for_config(config)


def last_uses(program: KernelProgram) -> list[int]:
    """Index of the last step that reads the output of each step; its own index if there is none."""
    last = list(range(len(program)))
    for index, step in enumerate(program):
        for source in step.sources:
            if source is not None:
                last[source] = index
    return last


def plan_buffers(sizes: Sequence[int], last: Sequence[int]) -> list[int]:
    """Buffer number for every output, without overlapping uses: the smallest free one that fits, or the largest grows.

    As ``relax.transform.StaticPlanBlockMemory`` reuses memory, so that outputs have the same placement as in the
    network.
    """
    capacities: list[int] = []
    free: set[int] = set()
    slots: list[int] = []
    for index, size in enumerate(sizes):
        fitting = [slot for slot in free if size <= capacities[slot] <= _WASTE * size]
        growing = [slot for slot in free if size / _WASTE <= capacities[slot] < size]
        if fitting:
            slot = min(fitting, key=lambda each: (capacities[each], each))
        elif growing:
            slot = max(growing, key=lambda each: (capacities[each], -each))
        else:
            slot = len(capacities)
            capacities.append(size)
        capacities[slot] = max(capacities[slot], size)
        free.discard(slot)
        slots.append(slot)
        free.update(slots[each] for each in range(index + 1) if last[each] == index)
    return slots


def _shape(operator: Operator, name: str) -> tuple[int, ...]:
    """Framework shape of the kernel argument ``name``."""
    if name == "gate":
        assert isinstance(operator, Conv2d)
        return operator.gate_shape
    return operator.input_shape if name == "data" else operator.output_shape


def _view(memory: np.ndarray, spec: TensorSpec) -> Any:
    start = -memory.ctypes.data % _ALIGNMENT
    held = memory[start : start + spec.size_bytes]
    return tensor_over(held.view(numpy_dtype(spec.dtype)).reshape(spec.shape))
