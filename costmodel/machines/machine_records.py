"""Machine records: compute rates, memory levels, cost of a parallel region; each number with its origin.

A :class:`Machine` holds SI units only (flop/s, bytes, bytes/s, seconds). A record defines its file: a key is the name
of the field without the unit suffix (``clock`` for ``clock_hz``), and a marker in ``Annotated`` gives the unit of a
quantity. Markers are used by :mod:`costmodel.machines.record_file`; machine files are found, read and written by
:mod:`costmodel.machines.machine_file`. Importing this module loads no pydantic.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, MinLen, MultipleOf

from costmodel.base.errors import MachineError
from costmodel.base.units import format_quantity, parse_quantity
from costmodel.operators.layers import DTYPE_BYTES

_UNITS_OF_NAMES = ("_bytes", "_seconds", "_hz", "_watts")
Handler = Callable[[Any], Any]


def key_of(field: str) -> str:
    """Key in a file for a record's ``field``."""
    return next((field.removesuffix(unit) for unit in _UNITS_OF_NAMES if field.endswith(unit)), field)


class Written(ABC):
    """Marker of a field whose representation in the file differs from its value."""

    @abstractmethod
    def parse(self, value: object) -> Any:
        """Parse the field's value from the file; ``ValueError`` describes the error."""

    @abstractmethod
    def format(self, value: Any) -> Any:
        """Representation of ``value`` in the file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.parse)


@dataclass(frozen=True)
class Quantity(Written):
    """Number written with its unit (``48 GB/s``) and held in SI units."""

    unit: str
    above_zero: bool = True
    most: float = math.inf

    def parse(self, value: object) -> float:
        number = parse_quantity(value, self.unit)
        if self.above_zero and number <= 0:
            raise ValueError(f"{value!r} must be above zero")
        if number > self.most:
            raise ValueError(
                f"{value!r} is more than any has ({self.format(self.most)}); correct the number or its unit"
            )
        return number

    def format(self, value: float) -> str:
        return format_quantity(value, self.unit)


@dataclass(frozen=True)
class Exactly:
    """Marker that accepts only values of the field's own type: no text for a number, no number for a text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        return {**handler(source), "strict": True}


@dataclass(frozen=True)
class KnownDtype:
    """Marker of a name in :data:`costmodel.operators.layers.DTYPE_BYTES`."""

    def check(self, name: str) -> str:
        """Return ``name``; ``ValueError`` lists the known dtypes."""
        if name not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {name!r}, known: {', '.join(DTYPE_BYTES)}")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class NotInFile:
    """Marker of a field absent from files, such as the file's own name."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import PydanticKnownError, core_schema

        def refuse(value: object) -> object:
            raise PydanticKnownError("unexpected_keyword_argument")

        return core_schema.no_info_plain_validator_function(refuse)


class FileRecord:
    """Base of records that are read from files: unknown keys are refused."""

    __pydantic_config__ = {"extra": "forbid", "alias_generator": key_of, "arbitrary_types_allowed": True}


Text = Annotated[str, Exactly(), MinLen(1)]
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}"


@dataclass(frozen=True)
class PlainName:
    """Marker of a name by which files are found and written: no folder, not hidden, no longer than a file name."""

    def check(self, name: str) -> str:
        """Return ``name``; raise ``ValueError`` if it is invalid."""
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"{name[:120]!r} is no name of letters, digits, _ . + -, at most 100 of them; choose another"
            )
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


Name = Annotated[str, Exactly(), PlainName()]
Names = tuple[Annotated[str, Exactly()], ...]
Flag = Annotated[bool, Exactly()]
Count = Annotated[int, Exactly(), Ge(1)]
DtypeKey = Annotated[str, Exactly(), KnownDtype()]


# Share of a cache that a working set can fill before it is evicted by conflicts and by other data: the rule of thumb of
# layer conditions (Stengel et al., ICS 2015). `calibrate` measures each level at this working set.
USABLE_SHARE = 0.5
# GeForce cards run above their boost clock while temperature and power allow: 1.13 times the datasheet's rate (5090).
ABOVE_BOOST = 1.15


@dataclass(frozen=True)
class PerThreads:
    """Number as a function of the thread count, at ascending counts; linearly interpolated between them."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        counts = [threads for threads, _ in self.points]
        if not counts or counts != sorted(set(counts)) or counts[0] != 1:
            raise ValueError(f"thread counts must ascend from 1, got {counts}")

    @property
    def max_threads(self) -> int:
        """Largest measured number of threads."""
        return self.points[-1][0]

    def at(self, threads: int) -> float:
        """Value at ``threads``; ``ValueError`` outside 1 .. :attr:`max_threads` (no extrapolation)."""
        if not 1 <= threads <= self.max_threads:
            raise ValueError(
                f"known for 1 to {self.max_threads} threads, not for {threads}; ask for as many, or calibrate with more"
            )
        above = next(index for index, (count, _) in enumerate(self.points) if count >= threads)
        count, value = self.points[above]
        if count == threads:
            return value
        lower_count, lower = self.points[above - 1]
        return lower + (value - lower) * (threads - lower_count) / (count - lower_count)


@dataclass(frozen=True)
class QuantityPerThreads(Written):
    """Marker of one ``quantity`` per thread count (``{1: 80 B/s, 2: 160 B/s}``), or a single one for one thread."""

    quantity: Quantity

    def parse(self, value: object) -> PerThreads:
        if not isinstance(value, dict):
            return PerThreads(((1, self.quantity.parse(value)),))
        if not all(isinstance(count, int) and not isinstance(count, bool) for count in value):
            raise ValueError(f"keys must be thread counts (integers), got {list(value)}")
        return PerThreads(tuple((count, self.quantity.parse(each)) for count, each in sorted(value.items())))

    def format(self, values: PerThreads) -> dict[int, str]:
        return {threads: self.quantity.format(value) for threads, value in values.points}


# Largest plausible figures of one machine: some ten times the present maximum; beyond them a unit is wrong.
_FLOPS, _BANDWIDTH = Quantity("FLOP/s", most=1e18), Quantity("B/s", most=1e14)
Flops = Annotated[float, _FLOPS]
FlopsPerThreads = Annotated[PerThreads, QuantityPerThreads(_FLOPS)]
Bandwidth = Annotated[float, _BANDWIDTH]
BandwidthPerThreads = Annotated[PerThreads, QuantityPerThreads(_BANDWIDTH)]
Seconds = Annotated[float, Quantity("s", most=10.0)]
SecondsPerThreads = Annotated[PerThreads, QuantityPerThreads(Quantity("s", above_zero=False, most=10.0))]
Bytes = Annotated[float, Quantity("B", most=1e14)]
Frequency = Annotated[float, Quantity("Hz", most=5e10)]
Power = Annotated[float, Quantity("W", most=2e4)]


@dataclass(frozen=True)
class ComputeRate(FileRecord):
    """Rate of one dtype in flop/s (a multiply-accumulate is two)."""

    # Measured on the machine, under a load of seconds.
    sustained: FlopsPerThreads
    origin: Text
    # The vendor's figure for the whole device, if known; not used in prices.
    datasheet: Flops | None = None
    # Rate of kernels that finish before the power limit lowers the clock; None if the clock never drops.
    burst: Flops | None = None

    @property
    def short_load(self) -> float:
        """Rate of kernels that finish before the clock drops."""
        return self.sustained.at(1) if self.burst is None else self.burst


# For a GPU's capacity, see MemoryLevel.usable.
_SHOWN_SHARE = 0.98


@dataclass(frozen=True)
class MemoryLevel(FileRecord):
    """Cache or memory level. Only sustained figures are used in prices."""

    name: Text
    # Capacity of one core's copy, or of the whole level if `shared`.
    capacity_bytes: Bytes
    shared: Flag
    # Sustained reads in bytes/s, all threads together.
    bandwidth: BandwidthPerThreads
    origin: Text
    # Sustained writes in bytes/s, all threads together.
    write_bandwidth: BandwidthPerThreads | None = None
    # The vendor's bandwidth, if known.
    datasheet: Bandwidth | None = None
    # Seconds of a load at a random address of a large array, address translation included; None if unknown.
    latency_seconds: Seconds | None = None
    # For a GPU's memory, the capacity that CUDA reports to a process, with ECC as the card is sold; None if unknown.
    usable_bytes: Bytes | None = None

    @property
    def usable(self) -> float:
        """Bytes available to a process: by default the share that cards with HBM report (A100 0.985, H100 0.989, B200
        0.991) and GeForce cards without ECC (0.98 to 0.99); cards with ECC in GDDR report 0.91 to 0.93.
        """
        return self.capacity_bytes * _SHOWN_SHARE if self.usable_bytes is None else self.usable_bytes

    def share_bytes(self, threads: int) -> float:
        """Working set that one of ``threads`` threads can keep here: half of its part of the capacity."""
        return USABLE_SHARE * (self.capacity_bytes / threads if self.shared else self.capacity_bytes)

    def seconds(self, size_bytes: float, threads: int, *, write: bool = False) -> float:
        """Seconds in which all threads together read (or write) ``size_bytes``."""
        rate = self.write_bandwidth if write and self.write_bandwidth is not None else self.bandwidth
        return size_bytes / rate.at(threads)


@dataclass(frozen=True)
class VectorUnit(FileRecord):
    """Vector registers of a CPU core and its instruction-set ``features``."""

    bits: Annotated[int, Exactly(), Ge(32), MultipleOf(8)]
    registers: Count
    features: Names
    origin: Text

    @property
    def register_bytes(self) -> int:
        """Bytes of one vector register."""
        return self.bits // 8


@dataclass(frozen=True)
class ParallelRegion(FileRecord):
    """Seconds to start a parallel region on a number of threads and to wait for its end."""

    seconds: SecondsPerThreads
    origin: Text


@dataclass(frozen=True)
class Host(FileRecord):
    """CPU on which a machine file was measured; used to detect files of another CPU."""

    architecture: Text
    features: Names
    threads: Count


_HALF_RATE = 2.5  # tensor cores over FP32 by datasheet: 2 on GeForce cards, 4 and more elsewhere
# Cards up to this power run without an extra connector; their clocks drop under load (P4, T4, L4).
POWER_LIMITED_WATTS = 75.0


@dataclass(frozen=True)
class GpuChip(FileRecord):
    """GPU properties besides rates and memories. Sizes are per multiprocessor (SM).

    ``clock_hz``: boost clock of the datasheet; ``power_watts``: board power limit; ``lanes``: FP32 lanes.
    """

    architecture: Text
    sm_count: Count
    lanes: Count
    clock_hz: Frequency
    max_threads: Annotated[int, Exactly(), Ge(32)]
    registers_bytes: Bytes
    shared_memory_bytes: Bytes
    power_watts: Power
    origin: Text

    @property
    def schedulers(self) -> int:
        """Warp instructions that one multiprocessor issues per cycle: four, or two on Pascal's P100, whose
        multiprocessors are smaller (CUDA C++ Programming Guide, architecture chapters).
        """
        return 2 if self.architecture == "pascal" and self.lanes == 64 else 4

    @property
    def compute_capability(self) -> tuple[int, int]:
        """CUDA compute capability, major and minor; graphics chips of Pascal and Ampere have 128 lanes, datacenter
        chips 64 (CUDA C++ Programming Guide, compute capabilities).
        """
        large = {"pascal": (6, 0), "volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0)}
        small = {"pascal": (6, 1), "ampere": (8, 6), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}
        return (large if self.lanes == 64 else small).get(self.architecture, (12, 0))

    @property
    def power_limited(self) -> bool:
        """True if the board power is too low to sustain the datasheet clock."""
        return self.power_watts <= POWER_LIMITED_WATTS


@dataclass(frozen=True)
class Link(FileRecord):
    """Link of one GPU; bytes/s in one direction, all lanes together.

    ``network``: one network card; ``c2c``: to the host's chip, instead of PCIe. ``datasheet``: the vendor's figure.
    ``joins``: GPUs that one such link connects, 2 for a bridge; ``None`` for all GPUs of a node.
    """

    kind: Literal["pcie", "nvlink", "c2c", "network"]
    bandwidth: Bandwidth
    datasheet: Bandwidth | None = field(default=None, kw_only=True)
    joins: Count | None = field(default=None, kw_only=True)
    latency_seconds: Seconds
    origin: Text


@dataclass(frozen=True)
class Machine(FileRecord):
    """Description of a machine for the cost models."""

    name: Name
    kind: Literal["cpu", "gpu"]
    description: Text
    compute: Annotated[Mapping[DtypeKey, ComputeRate], MinLen(1)]
    # From the core outwards.
    memory: Annotated[tuple[MemoryLevel, ...], MinLen(1)]
    # For a GPU, the duration of the shortest kernel.
    parallel_region: ParallelRegion
    # None if registers are not modelled (GPUs, toy machines).
    vector: VectorUnit | None = None
    host: Host | None = field(default=None, compare=False)
    source: Annotated[str, NotInFile()] = field(default="", compare=False)
    # Name of the machine from whose file this one is derived and whose measurements apply to it; empty if none.
    variant_of: Annotated[str, NotInFile()] = field(default="", compare=False)
    # Given for every GPU.
    gpu: GpuChip | None = None
    links: tuple[Link, ...] = ()

    def chip(self) -> GpuChip:
        """The GPU properties; :class:`MachineError` if this machine is no GPU."""
        if self.gpu is None:
            raise MachineError(f"{self._where()}: is no GPU (kind: {self.kind}); choose one of `costmodel machines`")
        return self.gpu

    @property
    def half_rate(self) -> bool:
        """True if the tensor cores of a GPU reach twice the FP32 rate by datasheet, as on GeForce cards; elsewhere four
        times and more.
        """
        single, half = self.compute.get("float32"), self.compute.get("float16")
        if single is None or half is None or not single.datasheet or not half.datasheet or self.chip().lanes <= 64:
            return False
        return half.datasheet <= _HALF_RATE * single.datasheet

    @property
    def above_datasheet(self) -> float:
        """Largest ratio of a GPU's rates to the datasheet's: above 1 where no power limit holds its clock."""
        return ABOVE_BOOST if self.half_rate else 1.0

    def link(self, kind: str) -> Link | None:
        """Link of the given kind, or ``None``."""
        return next((link for link in self.links if link.kind == kind), None)

    @property
    def max_threads(self) -> int:
        """Largest thread count for which every number is known."""
        rates = [rate.sustained for rate in self.compute.values()]
        levels = [level.bandwidth for level in self.memory]
        return min(known.max_threads for known in [*rates, *levels, self.parallel_region.seconds])

    def peak_flops(self, dtype: str, threads: int) -> float:
        """Sustained flop/s of ``dtype`` on ``threads`` threads; :class:`MachineError` if the file lacks it."""
        if dtype not in self.compute:
            known = ", ".join(self.compute)
            raise MachineError(
                f"{self._where()}: no compute rate for {dtype} (known: {known}); choose one of these number types, or "
                "another machine"
            )
        self.check_threads(threads)
        return self.compute[dtype].sustained.at(threads)

    def region_seconds(self, threads: int) -> float:
        """Seconds of one parallel region on ``threads`` threads."""
        self.check_threads(threads)
        return self.parallel_region.seconds.at(threads)

    def level_holding(self, per_thread_bytes: float, threads: int) -> MemoryLevel:
        """Innermost level whose share per thread holds ``per_thread_bytes``, else the outermost."""
        fits = (level for level in self.memory if per_thread_bytes <= level.share_bytes(threads))
        return next(fits, self.memory[-1])

    def check_threads(self, threads: int) -> None:
        """Raise :class:`MachineError` unless every number is known for ``threads``."""
        if not 1 <= threads <= self.max_threads:
            raise MachineError(
                f"{self._where()}: describes 1 to {self.max_threads} threads, {threads} asked; "
                f"run `python -m costmodel calibrate --threads {threads}` on that machine"
            )

    def _where(self) -> str:
        return self.source or f"machine {self.name!r}"
