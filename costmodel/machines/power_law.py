"""Clock and power of a GPU, and what a variant with another power limit sustains.

Power is a part that the clock does not move (leakage, memory's refresh, fans) and a part that goes with clock times the
square of the voltage. The voltage falls with the clock down to a floor, so that in shares of the boost clock x

    power above rest / power above rest at the boost clock = x * max(x, floor)^2
"""

from __future__ import annotations

# Share of the power limit that the clock does not move: H100 SXM (700 W, 794.5 TFLOP/s of 929 at 1,980 MHz, 132 SMs)
# and H100 PCIe (350 W, 504 TFLOP/s of 711 at 1,755 MHz, 114 SMs), both above the voltage floor, meet in 168 W. Left out
# of it: A100 SXM at 400 W sustains 257 TFLOP/s; by this rule 300 W leave 225, SimuMax's A100 PCIe measures 236.
REST_SHARE = 0.24
# Share of the boost clock below which the voltage falls no further. NeuSight op_latency: at 0.47 to 0.6 of its clock
# T4's rate goes with power itself, while H100's from 0.63 to 0.86 goes with its cube root.
VOLTAGE_FLOOR = 0.6
# What the best products draw above rest where the clock holds, in shares of (limit - rest). RTX 4090 (450 W): 2.72 GHz,
# 2.60 at 70 % of the limit and 2.44 at 60 % (hardwaretimes.com, "RTX 4090 with a power limit of 300W") say 0.69 and
# 0.66; RTX 3090 (350 W) at 280 W is 5 % slower (Puget Systems, "Quad RTX3090 GPU Wattage Limited"), which says 0.86.
HELD_DRAW = 0.7
# Share of the units' rate at the clock itself that the best products reach, V100 and A100, whose clocks hold, in FP32
# and on tensor cores; of 128 FP32 lanes, whose loads share the path of 64, as H100's.
CEILING, TENSOR_CEILING, WIDE_CEILING = 0.92, 0.86, 0.78
# A clock nearer to the boost clock than this is taken to hold: the ceilings are no better known.
_HOLDS = 0.97


def unthrottled_share(dtype: str, lanes: int) -> float:
    """Share of the datasheet rate of ``dtype`` that the best products reach while the boost clock holds, on
    multiprocessors of so many FP32 ``lanes``.
    """
    if dtype in ("tf32", "float16", "bfloat16"):
        return TENSOR_CEILING
    return WIDE_CEILING if lanes > 64 else CEILING


def power_at(clock: float) -> float:
    """Power above rest at ``clock`` (share of the boost clock), in shares of that at the boost clock."""
    return clock * max(clock, VOLTAGE_FLOOR) ** 2


def clock_at(power: float) -> float:
    """The clock (share of the boost clock) that draws ``power`` above rest; the inverse of :func:`power_at`."""
    return float(power ** (1 / 3) if power >= VOLTAGE_FLOOR**3 else power / VOLTAGE_FLOOR**2)


def share_at_limit(share: float, limit: float, other: float, size: float = 1.0, units: float = 1.0) -> float:
    """Sustained over burst rate with a board limit of ``other`` watts, where it is ``share`` with ``limit`` watts.

    size: multiprocessors times boost clock over those of the machine with ``limit``; what the clock does not move
    shrinks with a smaller chip, which is still no faster than the whole one with as much power, and is not taken to
    grow with a larger one. units: what a multiprocessor computes in a cycle over what it does there; fewer units draw
    less. ``ValueError`` for no power above rest.
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
    """Whether a sustained rate of ``held`` times :func:`unthrottled_share` of the datasheet is one at the boost clock,
    so that the limit is not met and there is power to spare (:data:`HELD_DRAW`).
    """
    return held >= _HOLDS
