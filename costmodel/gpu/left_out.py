"""A measured GPU as it would be known if it had not been measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from costmodel.gpu.residuals.fitted import power_class
from costmodel.machines.machine_records import ComputeRate, Machine, PerThreads


def left_out_machine(machine: Machine, others: Sequence[Machine], memories: Sequence[Machine] = ()) -> Machine:
    """``machine`` as its datasheet and other GPUs describe it: sustained = datasheet x the others' median share.

    ``others`` were measured in the same family and give the compute rates, those of the same power class if there are
    any; ``memories`` (else ``others``) give the DRAM bandwidth. Other cards with the same chip do not count.
    """
    others = _foreign(machine, others)
    compute = {}
    for dtype, rate in machine.compute.items():
        compute[dtype] = _left_out_rate(rate, [each.compute[dtype] for each in others if dtype in each.compute])
    level = machine.memory[-1]
    known_memories = [each.memory[-1] for each in _foreign(machine, memories or others)]
    shares = [each.bandwidth.at(1) / each.datasheet for each in known_memories if each.datasheet is not None]
    sustained = PerThreads(((1, float((level.datasheet or np.nan) * np.median(shares))),))
    memory = (*machine.memory[:-1], dataclasses.replace(level, bandwidth=sustained))
    return dataclasses.replace(machine, compute=compute, memory=memory)


def _foreign(machine: Machine, others: Sequence[Machine]) -> list[Machine]:
    """Those of ``others`` with another chip, of the power class of ``machine`` if there are any."""
    chip = machine.chip()
    foreign = [
        each
        for each in others
        if (each.chip().architecture, each.chip().sm_count) != (chip.architecture, chip.sm_count)
    ] or list(others)
    return [each for each in foreign if power_class(each) == power_class(machine)] or foreign


def _left_out_rate(rate: ComputeRate, others: Sequence[ComputeRate]) -> ComputeRate:
    """The datasheet of ``rate`` times the median shares that ``others`` reach of theirs, in a burst and a long load."""
    known = [each for each in others if each.datasheet is not None]
    if rate.datasheet is None or not known:
        return dataclasses.replace(rate, origin="left out")
    burst = rate.datasheet * float(np.median([each.short_load / (each.datasheet or np.nan) for each in known]))
    sustained = burst * float(np.median([each.sustained.at(1) / each.short_load for each in known]))
    return ComputeRate(PerThreads(((1, sustained),)), "left out", rate.datasheet, burst)
