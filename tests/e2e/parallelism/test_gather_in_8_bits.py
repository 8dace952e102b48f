"""FSDP's gathers of weights in 8 bits: what is sent, cast and kept, by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError
from e2e.parallelism import ParallelGraph, build, parse_parallel
from e2e.step.options import StepOptions

LAYERS, WIDTH, INNER, LENGTH, RANKS = 4, 64, 128, 32, 4
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}
LINEAR = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER  # seven weights of a layer
NORMS = 2 * WIDTH


def spread(folder: Path, more: str = "", **asked: Any) -> ParallelGraph:
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    step = StepOptions(**{"sequence_length": LENGTH, "dtype": "bfloat16", "precision": "fp8-tensorwise", **asked})
    return build(path, parse_parallel(f"fsdp={RANKS},master-weights=yes{more}"), step)


def sent(built: ParallelGraph, kind: str) -> Counter[int]:
    found = [task.collective for task in built.graph.ranks[0].tasks if task.collective is not None]
    return Counter(each.size_bytes for each in found if each.kind == kind)


def test_linear_layers_are_gathered_in_a_byte_each_and_norms_in_two(tmp_path: Path) -> None:
    wide, narrow = spread(tmp_path), spread(tmp_path, ",gather-dtype=float8")
    assert sent(wide, "all_gather")[(LINEAR + NORMS) * 2 // RANKS] == 2 * LAYERS
    assert sent(narrow, "all_gather")[(LINEAR + 2 * NORMS) // RANKS] == 2 * LAYERS
    assert sent(wide, "reduce_scatter") == sent(narrow, "reduce_scatter"), "gradients are as they were"
    assert sent(narrow, "all_reduce") == {7 * LAYERS * 4: 1} and not sent(wide, "all_reduce"), "a scale for each weight"


def test_shards_are_cast_instead_of_weights(tmp_path: Path) -> None:
    def casts(built: ParallelGraph) -> Counter[int]:
        """Elements of casts to 8 bits."""
        operators = [each for task in built.graph.ranks[0].tasks for each in task.operators]
        narrow = [each for each in operators if getattr(each, "output_dtype", "") == "float8" and each.outputs]
        return Counter(each.elements for each in narrow)

    wide, narrow = casts(spread(tmp_path)), casts(spread(tmp_path, ",gather-dtype=float8"))
    # Queries and results have as many elements, keys and values, and the three products of the MLP.
    weights = {WIDTH * WIDTH: 2, WIDTH * WIDTH // 2: 2, WIDTH * INNER: 3}
    fewer = wide - narrow
    assert {size: fewer[size] for size in weights} == {size: 2 * count * LAYERS for size, count in weights.items()}
    assert narrow[LINEAR // RANKS] == 2 * LAYERS


def test_what_is_gathered_takes_half_the_memory(tmp_path: Path) -> None:
    wide, narrow = (spread(tmp_path, more).memory[0].breakdown["buffers"] for more in ("", ",gather-dtype=float8"))
    assert narrow < wide


@pytest.mark.parametrize("precision", [None, "fp8-rowwise"])
def test_it_needs_the_recipe_that_torchao_has_it_for(tmp_path: Path, precision: str | None) -> None:
    with pytest.raises(InputError, match="gather-dtype=float8 gathers what is multiplied in 8 bits; give --precision"):
        spread(tmp_path, ",gather-dtype=float8", precision=precision)
