"""Built-in workloads of the models suite, most wanted first: an interrupted run still has one of each kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelCase:
    """Step to measure. ``sequence_length`` 0: the model has no sequences. ``traced``: with a profiled run."""

    model: str
    batch_size: int
    sequence_length: int = 0
    mode: str = "train"
    dtype: str = "float32"
    attention: str = "eager"
    traced: bool = False

    def record(self) -> dict[str, str | int]:
        """Return the columns that identify the case."""
        return {
            "model": self.model,
            "mode": self.mode,
            "dtype": self.dtype,
            "attention": self.attention,
            "batch_size": self.batch_size,
            "sequence_length": self.sequence_length,
        }

    def key(self) -> tuple[str, ...]:
        """Return the values of :meth:`record` as a table holds them."""
        return tuple(str(value) for value in self.record().values())

    def name(self) -> str:
        """Return a name for files."""
        return "-".join([self.model, self.mode, self.dtype, self.attention, *map(str, self._sizes())])

    def _sizes(self) -> tuple[int, ...]:
        return (self.batch_size, self.sequence_length) if self.sequence_length else (self.batch_size,)


_WORKLOADS = (
    ("gpt2-large", 4, 1024, True),
    ("resnet-50", 64, 0, True),
    ("dlrm-ddp", 2048, 0, True),
    ("bert-large", 8, 512, True),
    ("opt-1.3b", 2, 1024, False),
    ("inception-v3", 64, 0, False),
    ("llama-3.2-1b", 2, 1024, False),
    ("xlnet-base", 8, 512, False),
    ("dlrm", 512, 0, False),
    ("switch-base-8", 4, 256, False),
    ("gpt3-xl", 1, 1024, False),
    ("gpt2", 1, 128, False),
)
_FORMS = (
    ("train", "float32"),
    ("train", "bfloat16"),
    ("forward-backward", "float32"),
    ("inference", "float32"),
    ("train", "tf32"),
    ("inference", "bfloat16"),
    ("forward-backward", "bfloat16"),
)
CASES = tuple(
    ModelCase(model, batch, length, mode, dtype, traced=traced and (mode, dtype) == ("train", "float32"))
    for mode, dtype in _FORMS
    for model, batch, length, traced in _WORKLOADS
) + tuple(
    ModelCase(model, batch, length, "train", "bfloat16", "flash")
    for model, batch, length, _ in _WORKLOADS
    if length and not model.startswith(("xlnet", "switch"))
)
CPU_CASES = (ModelCase("gpt2", 1, 8, "inference"),)
