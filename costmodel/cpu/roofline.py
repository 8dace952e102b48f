"""Cache-aware roofline for convolution, pooling and dense kernels on CPUs, one kernel or several convolutions fused.

Unfused:  max(core, memory) + parallel region
    core    time of the arithmetic at the sustained rate, or of its operands through L1's ports if that takes longer
    memory  sum over the tensors of bytes / bandwidth of the level in which the tensor lives
Fused:    the same with core = sum of rho_i * core_i over the convolutions (rho: recomputation of the halo) and the
    intermediate in the private cache that holds its tile and the tile's weights; the best tile is chosen.
A 3x3 of stride 1, alone or in a pair of dense convolutions, is the better of direct sums and Winograd's algorithm,
whose three steps follow each other; what lies between them goes through the private cache that holds a block of
tiles. So is a layer with a long window, along one axis; where output channels are few, lanes hold columns.

A tensor lives in the innermost level that holds the working set between two uses of it. For activations that is the
kernel's own tensors; for weights, which are used once per run of the network, whatever the network touches in
between. The time is a lower bound, met if everything overlaps; ``upper`` of the estimate is the sum without any
overlap. Williams, Waterman, Patterson: Roofline (CACM 2009); the per-level form is Ilic, Pratas, Sousa's (IEEE CAL
2014).

**Row tiles of fused convolutions.** A fused kernel computes the last convolution in tiles of rows; for each tile it
first computes the rows of every intermediate that the tile reads. Neighbouring tiles need overlapping rows (the halo
of a window), which are computed twice: the recomputation factor rho is rows computed over rows that exist. Chains of
three and pairs with a dense window keep the rows shared by neighbouring tiles
(``schedules/kernels/fused/sliding_window.py``, ``conv_pair.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.cost_model import CostModel, Estimate
from costmodel.cpu.core_work import (
    OUTPUTS,
    CoreWork,
    WinogradWork,
    core_work,
    line_work,
    lines_of,
    vector_lanes,
    winograd_applies,
    winograd_work,
)
from costmodel.machines.machine_records import Machine, MemoryLevel
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.layers import (
    ChannelNorm,
    Conv2d,
    Dense,
    FusedConvs,
    Operator,
    Pool2d,
    conv_kind,
    element_bytes,
)


@dataclass(frozen=True)
class FusedTile:
    """A tile of ``rows`` rows of the last convolution.

    count: row tiles of one image. recomputation: rho of each convolution, 1 for the last.
    input_factor: rows of the input read by all tiles over rows that exist.
    resident_bytes: the intermediates' tile and the weights that it needs, which must stay in the caches.
    """

    rows: int
    count: int
    recomputation: tuple[float, ...]
    input_factor: float
    resident_bytes: int


def fused_tiles(operator: FusedConvs, lanes: int, threads: int = 1) -> list[FusedTile]:
    """Tiles of every height that gives a different number of tiles; ``lanes``: channels of one block."""
    height = operator.convs[-1].out_height
    heights = sorted({-(-height // count) for count in range(1, height + 1)})
    return [fused_tile(operator, rows, lanes, threads) for rows in heights]


def has_dense_window(operator: FusedConvs) -> bool:
    """True for a pair in which one convolution is a dense k x k convolution."""
    return len(operator.convs) == 2 and any(conv_kind(conv) == "conv" for conv in operator.convs)


def slides_a_window(operator: FusedConvs) -> bool:
    """True if the kernel slides down the rows and keeps the rows needed by the next step."""
    return len(operator.convs) > 2 or has_dense_window(operator)


def fused_tile(operator: FusedConvs, rows: int, lanes: int, threads: int = 1) -> FusedTile:
    """Tile of ``rows`` output rows (the last tile may be shorter).

    If the kernel slides a window (:func:`slides_a_window`), each of ``threads`` threads does so over its own rows: only
    the halo between two threads is computed twice, but all channels of the window stay resident.
    """
    height = operator.convs[-1].out_height
    slides = slides_a_window(operator)
    tiles = _bands(height, rows)
    computed = _bands(height, -(-height // threads)) if slides else tiles
    factors: list[float] = []
    resident = 0
    for index in range(len(operator.convs) - 1, -1, -1):
        conv = operator.convs[index]
        factors.append(sum(stop - start for start, stop in computed) / conv.out_height)
        if index < len(operator.convs) - 1:
            tallest = max(stop - start for start, stop in tiles)
            resident += _intermediate_bytes(conv, tallest, operator.convs[index + 1], lanes, slides)
        resident += _weight_bytes(operator, index, lanes, slides)
        tiles = [input_rows(conv, start, stop) for start, stop in tiles]
        computed = [input_rows(conv, start, stop) for start, stop in computed]
    rows_read = sum(stop - start for start, stop in computed)
    return FusedTile(
        rows=rows,
        count=-(-height // rows),
        recomputation=tuple(reversed(factors)),
        input_factor=rows_read / operator.convs[0].height,
        resident_bytes=resident,
    )


def _bands(height: int, rows: int) -> list[tuple[int, int]]:
    return [(start, min(start + rows, height)) for start in range(0, height, rows)]


def input_rows(conv: Conv2d, start: int, stop: int) -> tuple[int, int]:
    """Range of input rows read by output rows ``start`` to ``stop`` (exclusive), padding excluded."""
    extent = conv.dilation[0] * (conv.kernel[0] - 1) + 1
    first = start * conv.stride[0] - conv.padding[0]
    last = (stop - 1) * conv.stride[0] - conv.padding[0] + extent
    return max(first, 0), max(min(last, conv.height), max(first, 0))


def _intermediate_bytes(conv: Conv2d, rows: int, consumer: Conv2d, lanes: int, slides: bool) -> int:
    """Bytes of an intermediate's tile. A depthwise consumer of a pair takes one block of channels at a time; any other
    needs all channels.
    """
    channels = min(lanes, conv.out_channels) if consumer.is_depthwise and not slides else conv.out_channels
    return rows * conv.out_width * channels * element_bytes(middle_dtype(consumer))


def middle_dtype(consumer: Conv2d) -> str:
    """Data type of the intermediate read by ``consumer``: a depthwise convolution of a narrow dtype computes in FP32
    and reads unrounded values, a dense one takes operands of its own dtype. Quantised layers (``int8``) round as they
    would alone, so the intermediate is ``int8``.
    """
    narrow = element_bytes(consumer.dtype) < 4 and consumer.dtype != "int8"
    return "float32" if consumer.is_depthwise and narrow else consumer.dtype


def _weight_bytes(operator: FusedConvs, index: int, lanes: int, slides: bool) -> int:
    """Bytes of the weights that a tile needs: one channel block's if a pair ends in a depthwise convolution,
    else all.
    """
    conv = operator.convs[index]
    if slides or not operator.convs[-1].is_depthwise:
        return conv.weight_bytes
    share = min(lanes, conv.out_channels) / conv.out_channels
    return round(conv.weight_bytes * share)


@dataclass(frozen=True)
class RooflineStage:
    """Arithmetic of one convolution (or pooling, dense layer), or of one step of its algorithm.

    Seconds include rho and idle threads.
    """

    compute_seconds: float
    operand_seconds: float
    recomputation: float

    @property
    def seconds(self) -> float:
        """Seconds of the stage: the larger of arithmetic and operand loading."""
        return max(self.compute_seconds, self.operand_seconds)


@dataclass(frozen=True)
class TensorTraffic:
    """Bytes of a tensor (input, weights, residual, output, intermediate) moved to or from its memory level."""

    tensor: str
    size_bytes: float
    level: str
    seconds: float


@dataclass(frozen=True)
class RooflineReport:
    """Roofline time with all its terms."""

    operator: Operator
    machine: str
    threads: int
    stages: tuple[RooflineStage, ...]
    traffic: tuple[TensorTraffic, ...]
    region_seconds: float
    # Tile of a fused operator, else None.
    tile: FusedTile | None = None
    # Outputs along a side of a tile if a Winograd algorithm is the fastest, else 0.
    winograd_outputs: int = 0
    # True for a fused kernel whose tile and weights fit no private cache.
    spills: bool = False

    @property
    def compute_seconds(self) -> float:
        """Seconds of arithmetic over all stages."""
        return sum(stage.compute_seconds for stage in self.stages)

    @property
    def operand_seconds(self) -> float:
        """Time of the operands through L1's load and store ports."""
        return sum(stage.operand_seconds for stage in self.stages)

    @property
    def core_seconds(self) -> float:
        """Seconds in the cores. The stages are sequential in every tile: each takes the larger of arithmetic and
        operands.
        """
        return sum(stage.seconds for stage in self.stages)

    @property
    def memory_seconds(self) -> float:
        """Seconds of the traffic of all memory levels together."""
        return sum(traffic.seconds for traffic in self.traffic)

    @property
    def memory_seconds_by_level(self) -> dict[str, float]:
        """Seconds of the traffic of each memory level, by its name."""
        levels: dict[str, float] = {}
        for traffic in self.traffic:
            levels[traffic.level] = levels.get(traffic.level, 0.0) + traffic.seconds
        return levels

    @property
    def levels(self) -> dict[str, str]:
        """Memory level of each tensor."""
        return {traffic.tensor: traffic.level for traffic in self.traffic}

    @property
    def seconds(self) -> float:
        """Predicted seconds: the larger of cores and memory, plus the parallel region itself."""
        return max(self.core_seconds, self.memory_seconds) + self.region_seconds

    @property
    def serial_seconds(self) -> float:
        """Seconds without any overlap."""
        return self.compute_seconds + self.operand_seconds + self.memory_seconds + self.region_seconds

    @property
    def arithmetic_intensity(self) -> float:
        """Flop per byte of the tensors that enter and leave the kernel, each counted once."""
        operator = self.operator
        size = operator.input_bytes + operator.weight_bytes + operator.output_bytes + operator.residual_bytes
        return operator.flops / size

    @property
    def recomputation(self) -> float:
        """rho: flops computed over flops needed (1 if nothing is fused)."""
        if not isinstance(self.operator, FusedConvs):
            return 1.0
        assert self.tile is not None, "fused operators are computed in tiles"
        pairs = zip(self.operator.convs, self.tile.recomputation, strict=True)
        return sum(conv.flops * rho for conv, rho in pairs) / self.operator.flops

    @property
    def bound(self) -> str:
        """Largest term: ``compute``, ``operands`` (L1 ports), ``memory:LEVEL`` or ``parallel region``."""
        levels = self.memory_seconds_by_level
        outer = max(levels, key=levels.__getitem__)
        core = "compute" if self.compute_seconds >= self.operand_seconds else "operands"
        terms = {
            core: self.core_seconds,
            f"memory:{outer}": self.memory_seconds,
            "parallel region": self.region_seconds,
        }
        return max(terms, key=terms.__getitem__)

    def estimate(self) -> Estimate:
        """The report as a cost record; the breakdown is flat and JSON-able."""
        breakdown: dict[str, float | str] = {
            "arithmetic_intensity": self.arithmetic_intensity,
            "compute_seconds": self.compute_seconds,
            "operand_seconds": self.operand_seconds,
            "memory_seconds": self.memory_seconds,
            "parallel_region_seconds": self.region_seconds,
            "rho": self.recomputation,
        }
        breakdown |= {f"memory_seconds.{level}": value for level, value in self.memory_seconds_by_level.items()}
        breakdown |= {f"level.{tensor}": level for tensor, level in self.levels.items()}
        if self.tile is not None:
            breakdown |= {"tile_rows": self.tile.rows, "tile_resident_bytes": self.tile.resident_bytes}
        if self.winograd_outputs:
            breakdown["winograd_outputs"] = self.winograd_outputs
        return Estimate(self.seconds, self.seconds, self.serial_seconds, self.bound, breakdown, "analytic")


class RooflineModel(CostModel):
    """Roofline model of one machine and thread count. ``network_bytes`` as in :func:`explain_operator`."""

    def __init__(self, machine: Machine, threads: int, network_bytes: float = 0.0) -> None:
        machine.check_threads(threads)
        self.machine = machine
        self.threads = threads
        self.network_bytes = network_bytes

    def estimate(self, operators: Sequence[AnyOperator]) -> list[Estimate]:
        return [self.explain(operator).estimate() for operator in operators]

    def explain(self, operator: AnyOperator) -> RooflineReport:
        """Report from which :meth:`estimate` is made."""
        return explain_operator(operator, self.machine, self.threads, self.network_bytes)


def explain_operator(
    operator: AnyOperator, machine: Machine, threads: int, network_bytes: float = 0.0
) -> RooflineReport:
    """Roofline of ``operator`` on ``threads`` threads of ``machine``, back-to-back runs with warm caches.

    ``network_bytes``: bytes touched by a run of the whole network (mainly weights), which decide the level in which
    weights are found; 0 for a kernel that runs alone, as in a benchmark. Raises ``MachineError`` if the machine lacks
    the dtype or the thread count, ``UnsupportedOperatorError`` for an operator of another kind.
    """
    if not isinstance(operator, Conv2d | Pool2d | Dense | ChannelNorm | FusedConvs):
        raise UnsupportedOperatorError(
            f"the roofline does not cover operator {type(operator).__name__}; give convolutions, pools and dense layers"
        )
    # An operator too small to be shared runs as one task, without a parallel region.
    counts = dict.fromkeys((threads, 1))
    reports = [_explain(operator, _Setting(machine, count, network_bytes)) for count in counts]
    return min(reports, key=lambda report: report.seconds)


def _explain(operator: Operator, setting: _Setting) -> RooflineReport:
    """Report of the fastest algorithm on all threads of ``setting``."""
    if isinstance(operator, FusedConvs):
        return _explain_fused(operator, setting)
    machine, threads = setting.machine, setting.threads
    work = core_work(operator, machine)
    stage = setting.stage(work, _imbalance(work.units, threads))
    traffic = setting.tensors(operator, setting.working_set(operator))
    direct = RooflineReport(operator, machine.name, threads, (stage,), traffic, machine.region_seconds(threads))
    if not isinstance(operator, Conv2d) or machine.vector is None:
        return direct
    works = [line_work(lines, machine) for lines in lines_of(operator)]
    if setting.has_winograd(operator):
        works += [winograd_work(operator, machine, outputs) for outputs in OUTPUTS]
    fast = [_explain_winograd(operator, each, setting) for each in works]
    return min([direct, *fast], key=lambda report: report.seconds)


@dataclass(frozen=True)
class _Setting:
    machine: Machine
    threads: int
    network_bytes: float

    def stage(
        self,
        work: CoreWork,
        imbalance: float,
        recomputation: float = 1.0,
        operands: MemoryLevel | None = None,
    ) -> RooflineStage:
        """Stage of ``work``. ``operands``: memory level of loads and stores (default: L1)."""
        scale = imbalance * recomputation
        ports = operands or self.machine.memory[0]
        loads = ports.seconds(work.load_bytes, self.threads)
        stores = ports.seconds(work.store_bytes, self.threads, write=True)
        compute = work.flops / self.machine.peak_flops(work.arithmetic, self.threads)
        return RooflineStage(scale * compute, scale * max(loads, stores), recomputation)

    @property
    def private_bytes(self) -> float:
        """Bytes that fit the largest private memory level of a core."""
        return max((level.share_bytes(1) for level in self.machine.memory if not level.shared), default=0.0)

    def has_winograd(self, operator: Operator) -> bool:
        """True if a Winograd kernel exists; without vectors its transforms cannot be priced."""
        if not isinstance(operator, Conv2d) or self.machine.vector is None:
            return False
        return winograd_applies(operator, vector_lanes(self.machine, operator.dtype))

    def winograd_stages(
        self, work: WinogradWork, between: MemoryLevel, imbalance: float = 1.0, recomputation: float = 1.0
    ) -> list[RooflineStage]:
        """The three steps of Winograd's algorithm; intermediate values are written to and read from the level
        ``between``.
        """
        steps = ((work.transform, between), (work.products, None), (work.finish, between))
        return [
            self.stage(step, max(imbalance, _imbalance(step.units, self.threads)), recomputation, level)
            for step, level in steps
        ]

    def working_set(self, operator: Operator, extra: float = 0.0) -> float:
        """Bytes that one thread touches in a run: its part of the activations, and all weights."""
        activations = operator.input_bytes + operator.output_bytes + operator.residual_bytes
        return activations / self.threads + operator.weight_bytes + extra

    def tensors(
        self, operator: Operator, working_set: float, input_factor: float = 1.0, weight_bytes: int | None = None
    ) -> tuple[TensorTraffic, ...]:
        """Traffic of input, weights, residual and output, each once (the input with its halo).

        ``weight_bytes``: overrides the operator's, for weights in another layout.
        """
        near = self.level(working_set)
        far = self.level(max(working_set, self.network_bytes / self.threads))
        traffic = [self.traffic("input", operator.input_bytes * input_factor, near)]
        weight_bytes = operator.weight_bytes if weight_bytes is None else weight_bytes
        if weight_bytes:
            traffic.append(self.traffic("weights", weight_bytes, far))
        if operator.residual_bytes:
            traffic.append(self.traffic("residual", operator.residual_bytes, near))
        return (*traffic, self.traffic("output", operator.output_bytes, near, write=True))

    def level(self, per_thread_bytes: float) -> MemoryLevel:
        return self.machine.level_holding(per_thread_bytes, self.threads)

    def traffic(self, tensor: str, size: float, level: MemoryLevel, *, write: bool = False) -> TensorTraffic:
        return TensorTraffic(tensor, size, level.name, level.seconds(size, self.threads, write=write))


def _explain_winograd(conv: Conv2d, work: WinogradWork, setting: _Setting) -> RooflineReport:
    """Report of ``conv`` by tiles of ``work``, in blocks whose transformed input fits a private cache."""
    machine, threads = setting.machine, setting.threads
    mine = -(-work.tiles // threads)
    block = min(mine, max(1, int(setting.private_bytes // work.tile_bytes)))
    stages = setting.winograd_stages(work, setting.level(block * work.tile_bytes))
    activations = (conv.input_bytes + conv.output_bytes + conv.residual_bytes) / threads
    traffic = list(setting.tensors(conv, activations + work.weight_bytes, weight_bytes=work.weight_bytes))
    if (blocks := -(-mine // block)) > 1:
        again = setting.level(block * work.tile_bytes + work.weight_bytes)
        traffic.append(setting.traffic("weights of further tiles", threads * (blocks - 1) * work.weight_bytes, again))
    return RooflineReport(
        conv, machine.name, threads, tuple(stages), tuple(traffic), machine.region_seconds(threads),
        winograd_outputs=work.outputs,
    )  # fmt: skip


def _explain_fused(operator: FusedConvs, setting: _Setting) -> RooflineReport:
    """Report of the fastest tile among those that fit a private cache (among all tiles if none fits).

    A pair with a dense window may compute its layers by Winograd's algorithm too.
    """
    private = setting.private_bytes
    reports: list[RooflineReport] = []
    for layers in _fused_layers(operator, setting):
        tiles = layers.tiles()
        fitting = [tile for tile in tiles if tile.resident_bytes <= private] or tiles
        reports += [_fused_report(layers, tile) for tile in fitting]
    return min(reports, key=lambda report: report.seconds)


@dataclass(frozen=True)
class _FusedLayers:
    """Fused operator with the work of its convolutions: direct, or Winograd's with tiles of ``outputs`` where ``fast``
    has an entry.
    """

    operator: FusedConvs
    setting: _Setting
    works: tuple[CoreWork, ...]
    outputs: int
    fast: tuple[WinogradWork | None, ...]

    @property
    def weight_bytes(self) -> int:
        pairs = zip(self.operator.convs, self.fast, strict=True)
        return sum(conv.weight_bytes if work is None else work.weight_bytes for conv, work in pairs)

    def tiles(self) -> list[FusedTile]:
        """Row tiles; with Winograd's algorithm only whole bands of Winograd tiles, including the bytes of their
        transforms.
        """
        setting, operator = self.setting, self.operator
        tiles = fused_tiles(operator, vector_lanes(setting.machine, operator.dtype), setting.threads)
        if not self.outputs:
            return tiles
        height, found = operator.convs[-1].out_height, []
        for tile in tiles:
            if tile.rows % self.outputs and tile.rows < height:
                continue
            held = tile.resident_bytes + self.weight_bytes - operator.weight_bytes
            for conv, work in zip(operator.convs, self.fast, strict=True):
                bands = -(-tile.rows // self.outputs) if conv is operator.convs[-1] else 1
                if work is not None:
                    held += bands * -(-conv.out_width // self.outputs) * work.tile_bytes
            found.append(replace(tile, resident_bytes=held))
        return found


def _fused_layers(operator: FusedConvs, setting: _Setting) -> Iterator[_FusedLayers]:
    """The operator with direct sums, and with every algorithm that has kernels."""
    # Among fused kernels only those of one depthwise and one 1x1 layer multiply in tile registers.
    tiles = operator.kind in ("depthwise-pointwise", "pointwise-depthwise")
    works = tuple(core_work(conv, setting.machine, tiles) for conv in operator.convs)
    yield _FusedLayers(operator, setting, works, 0, (None,) * len(works))
    if not has_dense_window(operator):
        return
    for outputs in OUTPUTS:
        fast = tuple(
            winograd_work(conv, setting.machine, outputs) if setting.has_winograd(conv) else None
            for conv in operator.convs
        )
        if any(work is not None for work in fast):
            yield _FusedLayers(operator, setting, works, outputs, fast)


def _fused_report(layers: _FusedLayers, tile: FusedTile) -> RooflineReport:
    operator, setting = layers.operator, layers.setting
    imbalance = _tile_imbalance(operator, tile, layers.works[-1], setting.threads)
    level = setting.level(tile.resident_bytes)
    stages: list[RooflineStage] = []
    for direct, fast, rho in zip(layers.works, layers.fast, tile.recomputation, strict=True):
        if fast is None:
            stages.append(setting.stage(direct, imbalance, rho))
        else:
            stages += setting.winograd_stages(fast, level, imbalance, rho)
    working_set = setting.working_set(operator, extra=tile.resident_bytes - operator.weight_bytes)
    traffic = list(
        setting.tensors(operator, max(working_set, tile.resident_bytes), tile.input_factor, layers.weight_bytes)
    )
    # In L1 the weights stay from tile to tile; further out every tile streams them through the core again.
    if level is not setting.machine.memory[0] and tile.count > 1:
        again = layers.weight_bytes * (operator.batch * tile.count - 1)
        traffic.append(setting.traffic("weights of further tiles", again, level))
    traffic += _intermediates(operator, tile, level, setting)
    region = setting.machine.region_seconds(setting.threads)
    return RooflineReport(
        operator, setting.machine.name, setting.threads, tuple(stages), tuple(traffic), region, tile, layers.outputs,
        spills=level.shared,
    )  # fmt: skip


def _intermediates(operator: FusedConvs, tile: FusedTile, level: MemoryLevel, setting: _Setting) -> list[TensorTraffic]:
    """Traffic of the intermediates: each is written and read once per tile, in the cache that holds the tile."""
    size = sum(
        math.prod(conv.output_shape) * element_bytes(middle_dtype(consumer)) * rho
        for conv, consumer, rho in zip(operator.convs, operator.convs[1:], tile.recomputation, strict=False)
    )
    write, read = (setting.traffic("intermediate", size, level, write=write) for write in (True, False))
    return [TensorTraffic("intermediate", 2 * size, level.name, write.seconds + read.seconds)]


def _tile_imbalance(operator: FusedConvs, tile: FusedTile, last: CoreWork, threads: int) -> float:
    """Load imbalance when threads share row tiles; if a pair ends in a depthwise convolution, each channel block has
    its own.

    The last tile of an image may be shorter, so this counts rows, not tiles.
    """
    conv = operator.convs[-1]
    images = operator.batch
    if conv.is_depthwise and not slides_a_window(operator):
        images = last.units // conv.out_height
    busiest = -(-images * tile.count // threads) * tile.rows
    return max(busiest * threads / (images * conv.out_height), 1.0)


def _imbalance(units: int, threads: int) -> float:
    """Time of the busiest thread over the average: ``units`` equal pieces cannot always be shared evenly."""
    return -(-units // threads) * threads / units
