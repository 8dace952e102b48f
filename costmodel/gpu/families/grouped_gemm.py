"""Products of many experts in one launch, and fused layers of experts.

Tiles of all experts share the waves of one kernel: with counts c_e of rows, an output tile (tm, tn) and S
multiprocessors a product over the rows takes

    ceil(sum_e ceil(c_e / tm) * ceil(n / tn) / S) * 2 * tm * tn * k / (rate / S * efficiency(tile))

so that a few rows per expert cost a whole tile each. A gradient of the matrices has the tiles of its (k, n) outputs and
the depth c_e. Operands come from DRAM as in :mod:`costmodel.gpu.families.gemm`, expert by expert; each matrix of an
expert that gets rows is read once at least. A fused layer is both products, the activation, the gathering of rows and
the sum of results.

Features are shares and logarithms of these terms, the same for single products and for layers, so that a residual
learned on measured layers applies to the products of training steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.gemm import CLUSTER_SHARE, OVERLAP, STEP, TENSOR_TILES, Products, Tile, operand_traffic
from costmodel.gpu.families.rates import dram_bandwidth, kernel_floor, l2_bandwidth, matrix_rate
from costmodel.machines.machine_records import Machine
from costmodel.operators.attention import ENGINES
from costmodel.operators.experts import ExpertKernel, ExpertLayer, ExpertOperator, GroupedGemm
from costmodel.operators.layers import element_bytes, stored_bytes

# Additional kernels of a fused layer: counting and sorting rows by expert, gathering, activation, adding the results.
_BESIDES = 5


@dataclass(frozen=True)
class _Product:
    """Seconds of one product and their terms."""

    seconds: float
    compute: float
    dram: float
    l2: float
    waves: float
    filled: float  # share of the tiles' area that is not padding


class _Same:
    """Wrapper that makes a machine a cache key, equal only to the same object."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __hash__(self) -> int:
        return id(self.machine)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.machine is self.machine


def grouped_product(work: GroupedGemm, machine: Machine) -> _Product:
    """The product with its best tile."""
    return _known_product(work, _Same(machine))


@lru_cache(maxsize=2**17)  # a fit and its validation evaluate the same layers many times, at half a millisecond each
def _known_product(work: GroupedGemm, same: _Same) -> _Product:
    machine = same.machine
    counts = np.array([each for each in work.counts if each], dtype=float)
    if not len(counts):
        floor = kernel_floor(machine)
        return _Product(floor, 0.0, 0.0, 0.0, 0.0, 1.0)
    return min((_tiled(work, counts, tile, machine) for tile in TENSOR_TILES), key=lambda each: each.seconds)


def _tiled(work: GroupedGemm, counts: np.ndarray, tile: Tile, machine: Machine) -> _Product:
    chip, size = machine.chip(), element_bytes(work.dtype)
    rate = matrix_rate(machine, work.dtype) / chip.sm_count * tile.efficiency
    if work.wrt == "rows":
        heights, columns, depths = np.ceil(counts / tile.m), np.ceil(work.n / tile.n), np.full(len(counts), work.k)
        area = counts.sum() * work.n
    else:
        heights, columns = np.full(len(counts), np.ceil(work.k / tile.m)), np.ceil(work.n / tile.n)
        depths, area = counts, len(counts) * work.k * work.n
    depths = np.ceil(depths / STEP) * STEP + STEP
    tiles = heights * columns
    blocks, total = float(tiles.sum()), float((tiles * depths).sum())
    quantised = np.ceil(blocks / chip.sm_count) / (blocks / chip.sm_count)
    compute = quantised * total / chip.sm_count * 2 * tile.m * tile.n / rate
    l2 = total * (tile.m + tile.n) * size / l2_bandwidth(machine) * CLUSTER_SHARE.get(chip.architecture, 1.0)
    spared = work.active * work.n * work.k * (size - stored_bytes(work.stored, work.dtype))
    dram = (_operands(work, counts, tile, machine, size) - spared + work.write_bytes) / dram_bandwidth(machine)
    norm = (compute**OVERLAP + dram**OVERLAP + l2**OVERLAP) ** (1 / OVERLAP)
    waves = blocks / (chip.sm_count * tile.resident)
    return _Product(norm + kernel_floor(machine), compute, dram, l2, waves, float(area / (blocks * tile.m * tile.n)))


def _operands(work: GroupedGemm, counts: np.ndarray, tile: Tile, machine: Machine, size: int) -> float:
    """Bytes of operands from DRAM, computed as products that all have the mean number of rows."""
    mean = counts.mean()
    m, k = (mean, float(work.k)) if work.wrt == "rows" else (float(work.k), mean)
    batch, rows, n, depth, bytes_, rate = (np.array([float(each)]) for each in (len(counts), m, work.n, k, size, 1.0))
    return float(operand_traffic(Products(batch, rows, n, depth, bytes_, rate), tile, 1, machine)[0])


def _layer_besides(work: ExpertLayer, machine: Machine) -> float:
    """Seconds of gathering, activation and summing the results of a fused layer with 16-bit intermediates."""
    rows = sum(work.counts)
    inner = work.inner * ((2 if work.gated else 1) + 1)
    moved = inner * rows * 2 + rows * work.hidden * 2 + work.tokens * work.hidden * 2
    if work.kernel in ("cutlass", "trtllm"):  # gathers rows into a separate tensor
        moved += rows * work.hidden * 2 + work.tokens * work.hidden * 2
    return moved / dram_bandwidth(machine) + _BESIDES * kernel_floor(machine)


class GroupedProducts(Family[ExpertOperator]):
    """16-bit products of experts, alone or in fused layers."""

    name = "gemm-grouped"
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def analyse(self, operators: Sequence[ExpertOperator], machine: Machine) -> KernelAnalysis:
        rows = [_row(each, machine) for each in operators]
        columns = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
        terms = {name: columns[name] for name in ("compute", "memory:DRAM", "memory:L2", "launch")}
        features = {name: column for name, column in columns.items() if name not in terms and name != "analytic"}
        return KernelAnalysis(columns["analytic"], terms, features)

    def covers(self, operator: ExpertOperator) -> bool:
        return operator.dtype in self.dtypes


class ScaledGroupedProducts(GroupedProducts):
    """8-bit products of experts."""

    name = "gemm-grouped-8bit"
    dtypes = ("float8",)


class EngineExperts(GroupedProducts):
    """Fused layers of experts by the kernels that a serving engine selects, in 16 and 8 bits and with weights stored in
    4. Its tables are fitted by themselves: the same kernel is configured differently by each engine.
    """

    dtypes = ("bfloat16", "float16", "float8")

    def __init__(self, engine: ExpertKernel) -> None:
        self.name = f"experts-{engine}"

    def analyse(self, operators: Sequence[ExpertOperator], machine: Machine) -> KernelAnalysis:
        plain = super().analyse(operators, machine)
        own = {name: column for name, column in plain.features.items() if name != "triton"}
        own["bits"] = np.array([8 * stored_bytes(each.stored, each.dtype) for each in operators])
        own["chosen"] = safe_log2(np.array([sum(each.counts) / _tokens(each) for each in operators]))
        own["tokens"] = safe_log2(np.array([_tokens(each) for each in operators]))
        return KernelAnalysis(plain.seconds, plain.terms, own)


def _tokens(work: ExpertOperator) -> float:
    return float(work.tokens if isinstance(work, ExpertLayer) else work.rows)


def _row(work: ExpertOperator, machine: Machine) -> dict[str, float]:
    layer = isinstance(work, ExpertLayer)
    products = work.products if isinstance(work, ExpertLayer) else (work,)
    parts = [grouped_product(each, machine) for each in products]
    besides = _layer_besides(work, machine) if isinstance(work, ExpertLayer) else 0.0
    alone = sum(each.seconds for each in parts)
    seconds = alone + besides
    counts = [each for each in work.counts if each] or [0]
    mean = sum(counts) / len(counts)
    rate = matrix_rate(machine, products[0].dtype)
    weights = sum(each.active * each.n * each.k for each in products)
    return {
        "analytic": seconds,
        "compute": sum(each.compute for each in parts),
        "memory:DRAM": sum(each.dram for each in parts) + besides,
        "memory:L2": sum(each.l2 for each in parts),
        "launch": kernel_floor(machine) * len(parts),
        "seconds": float(np.log2(seconds)),
        "rows_of_expert": float(np.log2(max(mean, 1.0))),
        "skew": float(np.log2(max(max(counts), 1) / max(mean, 1.0))),
        "active": float(np.log2(len(counts))),
        "weights": float(np.log2(max(weights / len(counts) / len(products), 1.0))),
        "narrow": float(np.log2(min(min(each.n, each.k) for each in products))),
        "ideal": float(safe_log2(np.array(sum(each.flops for each in products) / rate / alone))),
        "dram": float(safe_log2(np.array(sum(each.dram for each in parts) / alone))),
        "l2": float(safe_log2(np.array(sum(each.l2 for each in parts) / alone))),
        "waves": float(safe_log2(np.array(max(min(each.waves for each in parts), 1e-3)))),
        "filled": float(safe_log2(np.array(min(each.filled for each in parts)))),
        "besides": besides / seconds,
        "triton": float(layer and work.kernel == "triton"),  # type: ignore[union-attr]
        "block": float(work.scaling == "block"),
    }


def grouped_family(operator: ExpertOperator) -> GroupedProducts:
    """Family whose kernels compute ``operator``."""
    if isinstance(operator, ExpertLayer) and operator.kernel in _ENGINES:
        return _ENGINES[operator.kernel]
    return _SCALED if operator.dtype in ScaledGroupedProducts.dtypes else _PLAIN


def engine_experts() -> dict[str, EngineExperts]:
    """Families of the serving engines' experts, by engine."""
    return dict(_ENGINES)


_PLAIN, _SCALED = GroupedProducts(), ScaledGroupedProducts()
_ENGINES: dict[str, EngineExperts] = {engine: EngineExperts(engine) for engine in ENGINES}
