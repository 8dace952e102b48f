"""Counts of the kernels of measured image models, with which ``python -m lab.fit`` inverts whole steps.

``python -m lab.fit.step_inventory --data FOLDER -o FILE`` writes it anew. Capturing needs timm and PyTorch, which
the fit does without: calibration/vision/steps.json.gz is its result. With ``--held-out N`` it draws steps that no
factor is fitted on instead, and writes their measured times beside them: what ``python -m costmodel fit --steps``
takes, and what a test watches (tests/lab/validate/vision_sample.json.gz: ``--held-out 12``).
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from costmodel.base.errors import ProjectError
from costmodel.gpu.own_gpu import CountedStep, write_inventory
from e2e.sources.user_script import prepare
from e2e.step.execution_graph import operator_counts
from lab.data.timm_steps import TimmStep
from lab.fit.image_steps import INVENTORY
from lab.steps.image_steps import all_steps, family_of, fitted_on, timm_request

MODELS_OF_A_FAMILY, TRAINED_MODELS = 2, 8
_EVERY = 25  # number of steps after which intermediate results are written


def inventory_steps(
    steps: Iterable[TimmStep], most: int = MODELS_OF_A_FAMILY, training: int = TRAINED_MODELS
) -> list[TimmStep]:
    """From each family, ``most`` models with all of their steps, and training steps of ``training`` models, which cover
    more classes of kernels; both spread evenly by time.
    """
    by_family: dict[str, list[TimmStep]] = {}
    for step in sorted(steps, key=lambda step: (not step.training, step.channels_last, step.seconds / step.batch)):
        by_family.setdefault(family_of(step.model), []).append(step)
    found: list[TimmStep] = []
    for _, members in sorted(by_family.items(), key=lambda item: zlib.crc32(item[0].encode())):
        kept = _spread_models(members, most)
        trained = _spread_models([step for step in members if step.training], training)
        found += [s for s in members if s.architecture in kept or (s.training and s.architecture in trained)]
    return found


def _spread_models(steps: Sequence[TimmStep], most: int) -> set[str]:
    models = list(dict.fromkeys(step.architecture for step in steps))
    return {models[round(place * (len(models) - 1) / max(most - 1, 1))] for place in range(min(most, len(models)))}


def drawn(steps: Iterable[TimmStep], count: int, machine: str = "", seed: int = 0) -> list[TimmStep]:
    """Draw ``count`` random ones of ``steps`` on which no factor is fitted, of different models, on ``machine``
    or any.
    """
    held_out = [step for step in steps if not fitted_on(step) and machine in ("", step.machine)]
    order = random.Random(seed).sample(sorted(held_out, key=lambda step: step.name), len(held_out))
    first: dict[str, TimmStep] = {}
    for step in order:
        first.setdefault(step.architecture, step)
    return list(first.values())[:count]


def main(arguments: Sequence[str] | None = None) -> None:
    """Captures the steps that factors are fitted on, or held-out ones, and writes their kernels."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, default=INVENTORY)
    parser.add_argument("--held-out", type=int, default=0, help="instead: so many random steps that are held out")
    parser.add_argument("--machine", default="", help="with --held-out: of this GPU alone")
    parser.add_argument("--seed", type=int, default=0, help="with --held-out: of the draw")
    asked = parser.parse_args(arguments)
    if asked.held_out:
        steps = drawn(all_steps(asked.data), asked.held_out, asked.machine, asked.seed)
    else:
        steps = inventory_steps(step for step in all_steps(asked.data) if fitted_on(step))
    found: list[CountedStep] = []
    gc.disable()  # captured models refer to themselves: they are collected below
    for count, step in enumerate(steps, 1):
        try:
            kernels = operator_counts(prepare(timm_request(step)).graph)
            seconds = step.seconds if asked.held_out else 0.0
            found.append(CountedStep(step.name, family_of(step.model), kernels, seconds))
        except (ProjectError, RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as reason:
            print(f"left out: {step.name}: {reason}".splitlines()[0], file=sys.stderr, flush=True)
        if count % _EVERY == 0:
            gc.collect()
            write_inventory(found, asked.output)
            print(f"{count} of {len(steps)}", file=sys.stderr, flush=True)
    write_inventory(found, asked.output)


if __name__ == "__main__":
    main()
