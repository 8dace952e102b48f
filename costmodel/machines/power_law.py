"""Clock and power of a GPU, and the sustained rate of a variant with another power limit.

Power is a part independent of the clock (leakage, memory's refresh, fans) and a part proportional to clock times the
square of the voltage. The voltage falls with the clock down to a floor, so that with x the clock relative to the
boost clock

    power above rest / power above rest at the boost clock = x * max(x, floor)^2
"""

from __future__ import annotations

# Share of the power limit that is independent of the clock: H100 SXM (700 W, 794.5 TFLOP/s of 929 at 1,980 MHz, 132
# SMs) and H100 PCIe (350 W, 504 TFLOP/s of 711 at 1,755 MHz, 114 SMs), both above the voltage floor, agree at 168 W.
# Held out: A100 SXM at 400 W sustains 257 TFLOP/s; by this rule 300 W leave 225, SimuMax's A100 PCIe measures 236.
REST_SHARE = 0.24
# Share of the boost clock below which the voltage falls no further. NeuSight op_latency: at 0.47 to 0.6 of its clock
# T4's rate goes with power itself, while H100's from 0.63 to 0.86 goes with its cube root.
VOLTAGE_FLOOR = 0.6
# Power of the best products above idle if the clock holds, as a share of (limit - idle). RTX 4090 (450 W): 2.72 GHz,
# 2.60 at 70 % of the limit and 2.44 at 60 % (hardwaretimes.com, "RTX 4090 with a power limit of 300W") give 0.69 and
# 0.66; RTX 3090 (350 W) at 280 W is 5 % slower (Puget Systems, "Quad RTX3090 GPU Wattage Limited"), which gives 0.86.
HELD_DRAW = 0.7
# Share of the units' rate at the actual clock that the best products reach, V100 and A100, whose clocks hold, in FP32
# and on tensor cores; with 128 FP32 lanes, whose loads share the path of 64, as on H100.
CEILING, TENSOR_CEILING, WIDE_CEILING = 0.92, 0.86, 0.78
# A clock nearer to the boost clock than this counts as held: the ceilings are no better known.
_HOLDS = 0.97


def unthrottled_share(dtype: str, lanes: int) -> float:
    """Share of the datasheet rate of ``dtype`` that the best products reach at the boost clock, on multiprocessors with
    ``lanes`` FP32 lanes.
    """
    if dtype in ("tf32", "float16", "bfloat16"):
        return TENSOR_CEILING
    return WIDE_CEILING if lanes > 64 else CEILING


def power_at(clock: float) -> float:
    """Power above idle at ``clock`` (share of the boost clock), relative to that at the boost clock."""
    return clock * max(clock, VOLTAGE_FLOOR) ** 2


def clock_at(power: float) -> float:
    """Clock (share of the boost clock) that draws ``power`` above idle; the inverse of :func:`power_at`."""
    return float(power ** (1 / 3) if power >= VOLTAGE_FLOOR**3 else power / VOLTAGE_FLOOR**2)


def share_at_limit(share: float, limit: float, other: float, size: float = 1.0, units: float = 1.0) -> float:
    """Sustained over burst rate with a board limit of ``other`` watts, given that it is ``share`` with ``limit`` watts.

    size: multiprocessors times boost clock, relative to the machine with ``limit``. The clock-independent power shrinks
    with a smaller chip, which is still no faster than the whole one at equal power, and is assumed not to grow with a
    larger one. units: work of a multiprocessor per cycle, relative to that machine; fewer units draw less.
    ``ValueError`` if no power remains above idle.
    """
    rest = REST_SHARE * limit * min(size, 1.0)
    if other <= rest:
        raise ValueError(f"{other:.0f} W are not more than the {rest:.0f} W that the clock does not move; give more")
    drawn = (1 - REST_SHARE) * limit * size * units
    clock = min(1.0, clock_at(power_at(share) * (other - rest) / drawn))
    if size < 1.0 and other > REST_SHARE * limit:
        clock = min(clock, share_at_limit(share, limit, other, 1.0, units) / size)
    return clock


def clock_holds(held: float) -> bool:
    """True if a sustained rate of ``held`` times :func:`unthrottled_share` of the datasheet is reached at the boost
    clock, so that the limit is not met and there is power to spare (:data:`HELD_DRAW`).
    """
    return held >= _HOLDS
