"""Published MFU against our count for the same measured steps: ``python -m lab.validate.published_mfu``.

Only the count of FLOPs is compared: both divide by the measured time and by the same datasheet rate. The sources use a
closed form, ``6 x parameters + 12 x layers x width x sequence`` per token, in which embeddings count as parameters,
whether a product uses them (a head tied to the words) or they are only looked up (positions of MPT, words of Llama).
``embeddings`` of :class:`ComparedMfu` is that addition.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from e2e.explain.utilisation import utilisation_of
from lab.data.data_folder import data_folder
from lab.steps.training_requests import AskedStep, asked_step
from lab.steps.training_rows import TrainingRow, read_training_rows
from lab.steps.training_runs import prepared


@dataclass(frozen=True)
class ComparedMfu:
    """``published`` and ``counted`` MFU of ``row``, as shares; ``hfu``: as counted. ``embeddings``: share of the
    published MFU for embeddings that are only looked up.
    """

    row: TrainingRow
    published: float
    counted: float
    hfu: float
    embeddings: float = 0.0

    @property
    def difference(self) -> float:
        """(counted - published) / published."""
        return self.counted / self.published - 1.0

    @property
    def unexplained(self) -> float:
        """(counted - published) / published, with embeddings counted as published."""
        return (self.counted + self.embeddings) / self.published - 1.0


def published_rows(data: Path) -> list[AskedStep]:
    """Requests for the rows of the table below ``data`` with a published MFU."""
    asked = (asked_step(row) for row in read_training_rows(data) if row.mfu)
    return [each for each in asked if isinstance(each, AskedStep)]


def compared(steps: Sequence[AskedStep], kept: Path) -> Iterator[ComparedMfu]:
    """Compare each of ``steps``; captures are cached in ``kept``. All micro-batches are the same: one is counted."""
    for step in steps:
        micro_batches = step.spec.micro_batches
        once = prepared(replace(step, spec=replace(step.spec, micro_batches=1)), kept)
        found = utilisation_of(once.graph, once.setting.machine, step.row.seconds / micro_batches)
        assert found is not None and found.mfu is not None and found.hfu is not None
        (peak,) = found.peak_flops_per_second.values() if step.precision is None else (0.0,)
        yield ComparedMfu(step.row, step.row.mfu, found.mfu, found.hfu, _embeddings(step) / peak if peak else 0.0)


def _embeddings(step: AskedStep) -> float:
    """Flop/s of one GPU for embeddings that are only looked up, if they were multiplied."""
    from transformers import CONFIG_MAPPING

    from e2e.capture.models.transformer import PRESETS

    given = {**PRESETS[step.model], **step.config}
    config = CONFIG_MAPPING[given.pop("model_type")](**given)
    rows = getattr(config, "n_positions", 0) + (0 if config.tie_word_embeddings else config.vocab_size)
    tokens = step.row.global_batch * step.sequence_length / step.row.seconds / step.row.gpus
    return float(6 * rows * config.hidden_size * tokens)


def main() -> None:
    """Print the table of all rows, or of every n-th."""
    parser = argparse.ArgumentParser(description="Published MFU beside the one that is counted here.")
    parser.add_argument("--data", type=Path, help="folder of the measurements (default: as validate)")
    parser.add_argument("--every", type=int, default=1, help="of the rows only every n-th")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="published-mfu-") as kept:
        differences, unexplained = [], []
        for each in compared(published_rows(data_folder(asked.data))[:: asked.every], Path(kept)):
            differences.append(abs(each.difference))
            unexplained.append(abs(each.unexplained))
            print(
                f"{each.row.name:88s} published {each.published:6.2%}  counted {each.counted:6.2%} "
                f"({each.difference:+.2%}, embeddings counted {each.unexplained:+.2%})  HFU {each.hfu:6.2%}",
                flush=True,
            )
    for name, values in (("difference", differences), ("of it not by embeddings", unexplained)):
        print(f"{len(values)} rows, {name}: mean {sum(values) / len(values):.2%}, largest {max(values):.2%}")


if __name__ == "__main__":
    main()
