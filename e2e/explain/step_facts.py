"""Facts of a prediction beside its times: what was asked, on which board, how much is processed in which time."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.machines.machine_records import Machine


@dataclass(frozen=True)
class AskedValue:
    """An option that counts for the step. ``given``: the user asked for ``value``; else it is the default that was
    taken.
    """

    option: str
    value: str
    given: bool


@dataclass(frozen=True)
class Board:
    """The GPU that was taken: which variant, how much memory, which power limit."""

    name: str
    description: str
    memory_bytes: int
    power_limit_watts: float
    multiprocessors: int


@dataclass(frozen=True)
class Throughput:
    """Of a step that processes ``samples`` on all GPUs together, each of ``sequence_length`` tokens (``None``: samples
    are no sequences). ``made_of``: the sizes that ``samples`` is the product of, in words; may be empty.
    ``batch_size``: of a script, samples of one pass on one GPU.
    """

    samples: int
    sequence_length: int | None
    samples_per_second: float
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    made_of: str = ""
    batch_size: int | None = None

    @property
    def tokens(self) -> int | None:
        """Of one step, all GPUs together."""
        return None if self.sequence_length is None else self.samples * self.sequence_length


def board_of(machine: Machine) -> Board | None:
    """The board of ``machine``; ``None`` of one that is no GPU."""
    chip = machine.gpu
    if chip is None:
        return None
    capacity = int(machine.memory[-1].capacity_bytes)
    return Board(machine.name, machine.description, capacity, chip.power_watts, chip.sm_count)


def throughput_of(
    samples: int, sequence_length: int | None, seconds: float, gpus: int, made_of: str = ""
) -> Throughput:
    """Of a step of ``seconds`` on ``gpus`` GPUs."""
    tokens = None if sequence_length is None else samples * sequence_length / seconds
    each = None if tokens is None else tokens / gpus
    return Throughput(samples, sequence_length, samples / seconds, tokens, each, made_of)
