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


def power_at(clock: float) -> float:
    """Power above rest at ``clock`` (share of the boost clock), in shares of that at the boost clock."""
    return clock * max(clock, VOLTAGE_FLOOR) ** 2


def clock_at(power: float) -> float:
    """The clock (share of the boost clock) that draws ``power`` above rest; the inverse of :func:`power_at`."""
    return float(power ** (1 / 3) if power >= VOLTAGE_FLOOR**3 else power / VOLTAGE_FLOOR**2)


def share_at_limit(share: float, limit: float, other: float) -> float:
    """Sustained over burst rate with a board limit of ``other`` watts, where it is ``share`` with ``limit`` watts.

    The same chip and clocks; what the clock does not move stays the same. ``ValueError`` for no power above rest.
    """
    rest = REST_SHARE * limit
    if other <= rest:
        raise ValueError(f"{other:.0f} W are not more than the {rest:.0f} W that the clock does not move; give more")
    return min(1.0, clock_at(power_at(share) * (other - rest) / (limit - rest)))
