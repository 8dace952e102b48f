"""Construction of a GPU's cost model: a kernel model for every operator type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.cost_model import CostModel, Estimate
from costmodel.gpu.families.attention import attention_family
from costmodel.gpu.families.convolution import TensorConvolution, convolution_family
from costmodel.gpu.families.family import MEASURED_KERNELS, Family, shares_of
from costmodel.gpu.families.gemm import ScaledCasts, ScaledProducts, StoredProducts, ThinProducts, gemm_family
from costmodel.gpu.families.grouped_gemm import engine_experts, grouped_family
from costmodel.gpu.families.linear_scans import linear_family
from costmodel.gpu.families.lookups import LookupKernels
from costmodel.gpu.families.memory_bound import Copies, MemoryBound, MemoryBoundOperator, Sorting, is_within_device
from costmodel.gpu.families.normalization import (
    HalfRows,
    ImageKernels,
    NormRows,
    RecentNormRows,
    SoftmaxRows,
    is_half_work,
    is_image_work,
)
from costmodel.gpu.fitted import (
    ANY_POWER,
    DIRECTORY,
    ENGINES,
    SCANS,
    SERVING,
    Level,
    LevelTransfer,
    adaptations_for,
    level_transfer,
    merge_transfers,
    residuals_for,
)
from costmodel.gpu.kernel_model import KernelModel, no_less
from costmodel.gpu.power import GpuCostModel
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention, CausalConvolution, LinearAttention
from costmodel.operators.device_work import (
    ConvolutionBackward,
    Gemm,
    MemoryCopy,
    Normalization,
    Pooling,
    RadixSort,
    ScaledCast,
    ScaledGemm,
    Softmax,
    StoredGemm,
)
from costmodel.operators.experts import ExpertLayer, GroupedGemm
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup


def gpu_cost_model(machine: Machine, directory: Path = DIRECTORY) -> CostModel:
    """Cost model of every operator of :mod:`costmodel.operators.device_work`, ``Conv2d`` and ``Pool2d`` on the GPU
    ``machine``.

    ``directory``: the fitted models. ``MachineError`` if ``machine`` is no GPU, ``InputError`` for a corrupt file.
    """
    residuals, levels = residuals_for(machine, directory), _with_inverted(level_transfer(directory), machine)
    moved = adaptations_for(machine, directory)
    models: dict[type, CostModel] = {Gemm: _Products(machine, partial(_product, machine), residuals, levels, moved)}
    convolutions = KernelModel(machine, partial(_convolution, machine), residuals, levels, moved)
    models |= dict.fromkeys((Conv2d, ConvolutionBackward), convolutions)
    models[Normalization] = KernelModel(machine, partial(_normalization, machine), residuals, levels, moved)
    served, both = dict(residuals), levels
    for folder in (SERVING, ENGINES):
        served |= residuals_for(machine, directory / folder)
        both = merge_transfers(both, level_transfer(directory / folder))
    models[Attention] = KernelModel(machine, partial(attention_family, machine=machine), served, both, moved)
    experts = _Experts(machine, _experts, served, both, moved)
    scaled = KernelModel(machine, partial(_always, ScaledProducts()), residuals, levels, moved)
    experts.dense = lambda each: (scaled if isinstance(each, ScaledGemm) else models[Gemm]).estimate([each])[0]
    models |= {GroupedGemm: experts, ExpertLayer: experts, ScaledGemm: scaled}
    models |= dict.fromkeys(
        get_args(MemoryBoundOperator), KernelModel(machine, _memory_bound, residuals, levels, moved)
    )
    scans = KernelModel(
        machine, linear_family, residuals_for(machine, directory / SCANS), level_transfer(directory / SCANS), moved
    )
    models |= dict.fromkeys((LinearAttention, CausalConvolution), scans)
    for types, family in _families():
        models |= dict.fromkeys(types, KernelModel(machine, partial(_always, family), residuals, levels, moved))
    return GpuCostModel(models, machine)


class _Products(KernelModel):
    """Kernel model of matrix products. A batched product is never faster than one dense product of all its rows, unless
    it was measured: on the GPUs of the FP32 tables libraries have better kernels for batched products than for single
    ones.
    """

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        found = super().estimate(operators)
        several = {each: self._bounded_by(each) for each in dict.fromkeys(operators)}
        dense = list(dict.fromkeys(product for products in several.values() for product in products))
        if not dense:
            return found
        seconds = dict(zip(dense, (each.seconds for each in self._dense(dense)), strict=True))
        return no_less(found, np.array([sum(seconds[product] for product in several[each]) for each in operators]))

    def _bounded_by(self, operator: AnyOperator) -> Sequence[Gemm | ScaledGemm]:
        return [] if self.is_learned(operator) else _together(operator)

    def _dense(self, products: Sequence[Gemm | ScaledGemm]) -> Sequence[Estimate]:
        return super().estimate(products)


class _Experts(_Products):
    """Kernel model of expert products, bounded even where measured, but for those of engines' own tables; :attr:`dense`
    prices dense products, which may be scaled.
    """

    dense: Callable[[Gemm | ScaledGemm], Estimate]

    def _bounded_by(self, operator: AnyOperator) -> Sequence[Gemm | ScaledGemm]:
        stored = isinstance(operator, ExpertLayer) and operator.kernel in engine_experts()
        return [] if stored else _together(operator)

    def _dense(self, products: Sequence[Gemm | ScaledGemm]) -> Sequence[Estimate]:
        return [self.dense(each) for each in products]


def _together(operator: AnyOperator) -> Sequence[Gemm | ScaledGemm]:
    """For each of the products that ``operator`` computes together, one dense product of equal work."""
    if isinstance(operator, Gemm):
        return [replace(operator, batch=1, m=operator.batch * operator.m)] if operator.batch > 1 else []
    if not isinstance(operator, GroupedGemm | ExpertLayer):
        return []
    products = operator.products if isinstance(operator, ExpertLayer) else (operator,)
    return [_dense(each) for each in products if each.rows]


def _dense(product: GroupedGemm) -> Gemm | ScaledGemm:
    """One dense product with as much work as ``product``."""
    m, k = (product.rows, product.k) if product.wrt == "rows" else (product.k, product.rows)
    if product.dtype == "float8":
        return ScaledGemm(m, product.n, k, product.dtype, product.scaling or "tensor")
    return Gemm(1, m, product.n, k, product.dtype, transpose_b=True)


def _with_inverted(known: LevelTransfer, machine: Machine) -> LevelTransfer:
    """``known`` with levels added for families whose factors are inverted from whole steps: a level of 0, with the
    spread that these steps show, or single kernels where they were measured.
    """
    shares = shares_of(machine)
    if not shares.factors:
        return known
    level = {ANY_POWER: Level(0.0, -shares.spread, shares.spread, ())}
    names = (TensorConvolution.name, ImageKernels.name, ThinProducts.name, HalfRows.name, RecentNormRows.name)
    return replace(known, levels={**known.levels, **dict.fromkeys(names, level)})


def _product(machine: Machine, operator: AnyOperator) -> Family[Any]:
    if not isinstance(operator, Gemm):
        raise UnsupportedOperatorError(
            f"no matrix product: {type(operator).__name__}; ask gpu_cost_model, which prices all kinds"
        )
    return gemm_family(operator, machine)


_ROWS, _RECENT_ROWS, _IMAGES, _HALF = NormRows(), RecentNormRows(), ImageKernels(), HalfRows()
_MEMORY, _COPIES = MemoryBound(), Copies()


def _convolution(machine: Machine, operator: AnyOperator) -> Family[Any]:
    if not isinstance(operator, (Conv2d, ConvolutionBackward)):
        raise UnsupportedOperatorError(
            f"no convolution: {type(operator).__name__}; ask gpu_cost_model, which prices all kinds"
        )
    return convolution_family(operator, machine)


def _normalization(machine: Machine, operator: AnyOperator) -> Family[Any]:
    if is_image_work(operator):
        return _IMAGES
    if machine.chip().architecture in MEASURED_KERNELS:
        return _RECENT_ROWS
    return _HALF if is_half_work(operator) else _ROWS


def _memory_bound(operator: AnyOperator) -> Family[Any]:
    if isinstance(operator, MemoryCopy) and not is_within_device(operator):
        return _COPIES
    return _HALF if is_half_work(operator) else _MEMORY


def _experts(operator: AnyOperator) -> Family[Any]:
    if not isinstance(operator, GroupedGemm | ExpertLayer):
        raise UnsupportedOperatorError(
            f"no work of experts: {type(operator).__name__}; ask gpu_cost_model, which prices all kinds"
        )
    return grouped_family(operator)


def _always(family: Family[Any], operator: AnyOperator) -> Family[Any]:
    return family


def _families() -> list[tuple[tuple[type, ...], Family[Any]]]:
    return [
        ((Softmax,), SoftmaxRows()),
        ((Pooling,), _IMAGES),
        ((EmbeddingLookup,), LookupKernels()),
        ((ScaledCast,), ScaledCasts()),
        ((StoredGemm,), StoredProducts()),
        ((RadixSort,), Sorting()),
    ]
