"""Facts of a prediction besides its times: options, board, throughput."""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.machines.machine_records import Machine


@dataclass(frozen=True)
class AskedValue:
    """Value of an option that matters for the step."""

    option: str
    value: str
    # True if the user gave it; otherwise it is the default.
    given: bool


@dataclass(frozen=True)
class Board:
    """GPU board: variant, memory and power limit."""

    name: str
    description: str
    memory_bytes: int
    power_limit_watts: float
    multiprocessors: int


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step."""

    # Samples on all GPUs together.
    samples: int
    # Tokens of a sample; `None`: samples are not sequences.
    sequence_length: int | None
    samples_per_second: float
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    # Sizes whose product `samples` is, in words; may be empty.
    made_of: str = ""
    # Samples of one pass on one GPU, for scripts.
    batch_size: int | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of one step on all GPUs together, ``None`` if samples are not sequences."""
        return None if self.sequence_length is None else self.samples * self.sequence_length


def board_of(machine: Machine) -> Board | None:
    """Return the board of ``machine``, ``None`` if it is no GPU."""
    chip = machine.gpu
    if chip is None:
        return None
    capacity = int(machine.memory[-1].capacity_bytes)
    return Board(machine.name, machine.description, capacity, chip.power_watts, chip.sm_count)


def throughput_of(
    samples: int, sequence_length: int | None, seconds: float, gpus: int, made_of: str = ""
) -> Throughput:
    """Return the throughput of a step of ``seconds`` on ``gpus`` GPUs."""
    tokens = None if sequence_length is None else samples * sequence_length / seconds
    each = None if tokens is None else tokens / gpus
    return Throughput(samples, sequence_length, samples / seconds, tokens, each, made_of)
