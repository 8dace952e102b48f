"""Relations between predictions: what must hold between a step and the same step with something changed.

A relation is a row: how a setting is drawn, how it is changed (once or several times, each answer is held against the
one before), and what must hold. Settings are drawn by hypothesis, the same in every run; more of them with
``make thorough``. Every prediction that a relation asks for is also held against :func:`check_figures`.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Options = Mapping[str, Any]
Change = Callable[[Options], Options]

# Goes with this process.
_FOLDER = tempfile.TemporaryDirectory(prefix="relations-")
HERE = Path(_FOLDER.name)
CAPTURES = HERE / "captures"

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 2,
          "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 5632, "vocab_size": 32000,
          "max_position_embeddings": 16384}  # fmt: skip
# Small models whose layers are as wide as those of large ones (llama, mixtral), or launch-bound (gpt2).
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-4-layers": _LLAMA | {"num_hidden_layers": 4},
    "llama-6-layers": _LLAMA | {"num_hidden_layers": 6},
    "llama-wide": _LLAMA | {"hidden_size": 4096, "intermediate_size": 11264, "num_attention_heads": 32},
    "llama-words": _LLAMA | {"vocab_size": 128256},
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 2, "n_head": 12,
             "n_positions": 16384},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 1024,
                "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8,
                "intermediate_size": 3584, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
                "max_position_embeddings": 16384},
}  # fmt: skip


@functools.cache
def configuration(name: str) -> str:
    path = HERE / f"{name}.json"
    path.write_text(json.dumps(CONFIGURATIONS[name]))
    return str(path)


@functools.lru_cache(maxsize=128)
def _answer(asked: tuple[tuple[str, Any], ...]) -> Any:
    import e2e

    options = dict(asked)
    if "config" in options:
        options["model_config"] = configuration(options.pop("config"))
    found = e2e.predict(**options)
    check_figures(found)
    return found


def answer(options: Options) -> Any:
    """The prediction; asked once."""
    return _answer(tuple(sorted(options.items())))


# Of its limit, what a board draws at rest (costmodel/gpu/power.py).
REST = 0.24


def check_figures(found: Any) -> None:
    """What holds of every prediction by itself."""
    low, high = found.interval_seconds
    assert 0 < low < found.iteration_seconds < high
    used, energy = found.utilisation, found.energy
    if used is not None:
        assert used.executed_flops >= used.model_flops
        if used.mfu is not None:
            assert 0 < used.mfu <= used.hfu
            assert used.hfu <= 1 or any("of what its GPUs can" in line for line in found.warnings)
    if energy is not None:
        assert REST * energy.limit_watts * 0.999 <= energy.mean_watts <= energy.limit_watts * 1.001
        assert energy.joules == pytest.approx(energy.mean_watts * found.gpus * found.iteration_seconds)
    rate = found.throughput
    assert rate.samples_per_second * found.iteration_seconds == pytest.approx(rate.samples)
    step = found.critical_path_seconds
    assert sum(found.attribution.values()) == pytest.approx(step)
    for rank in found.ranks:
        assert sum(rank.attribution.values()) == pytest.approx(step)
        assert sum((rank.memory_breakdown or {}).values()) == (rank.peak_memory_bytes or 0)


@dataclass(frozen=True)
class Relation:
    """``holds``: of every two answers that follow each other in ``steps``."""

    name: str
    drawn: st.SearchStrategy[Options]
    steps: tuple[Change, ...]
    holds: Callable[[Any, Any], bool]

    def check(self, setting: Options) -> None:
        """Of one ``setting``."""
        asked = [step(setting) for step in self.steps]
        answers = [answer(options) for options in asked]
        for place, (one, other) in enumerate(zip(answers, answers[1:], strict=False)):
            assert self.holds(one, other), "\n".join(
                [f"{self.name}: broken"]
                + [f"  {told(found)}: {dict(options)}" for found, options in zip(answers, asked, strict=True)][
                    place : place + 2
                ]
            )


def told(found: Any) -> str:
    low, high = found.interval_seconds
    memory = (found.peak_memory_bytes or 0) / 2**30
    mfu = "" if found.utilisation is None else f", {found.utilisation.model_flops:.4g} FLOPs"
    return f"{found.iteration_seconds * 1e3:.4f} ms ({low * 1e3:.4f} to {high * 1e3:.4f}), {memory:.3f} GiB{mfu}"


def held(rows: list[Relation], drawn: int = 1, thorough: int = 12) -> tuple[Any, Any]:
    """The tests of ``rows``: with few settings in every run, with more in thorough ones."""

    def test(count: int) -> Any:
        @pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])
        # Not shrunk: a setting is as plain as another, and each takes a prediction.
        @settings(
            max_examples=count, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(data=st.data())
        def relation(row: Relation, data: st.DataObject) -> None:
            row.check(data.draw(row.drawn))

        return relation

    return test(drawn), pytest.mark.thorough(test(thorough))


# -- settings ----------------------------------------------------------------------------------------------------------

CARDS = ("h100-sxm", "a100-sxm-80gb", "l40s", "rtx-4090", "b200-sxm", "v100-sxm2-32gb", "t4", "h200-sxm")


def one_gpu(**values: Any) -> st.SearchStrategy[Options]:
    """Steps on one GPU; ``values``: what each option is chosen from (a tuple), or is."""
    return _drawn({"config": ("llama", "gpt2"), "gpu": CARDS, "batch_size": (2, 8), "sequence_length": (1024, 2048),
                   **values})  # fmt: skip


def several(**values: Any) -> st.SearchStrategy[Options]:
    """Steps on eight GPUs."""
    return _drawn({"config": ("llama", "gpt2"), "gpu": ("h100-sxm", "a100-sxm-80gb", "h200-sxm", "l40s"), "gpus": 8,
                   "parallel": ("fsdp=8", "dp=8", "tp=2,dp=4", "fsdp=8,zero=1"), "batch_size": (1, 4),
                   "sequence_length": (1024,), **values})  # fmt: skip


def _drawn(values: Options) -> st.SearchStrategy[Options]:
    chosen = {
        name: st.sampled_from(each) if isinstance(each, tuple) else st.just(each) for name, each in values.items()
    }
    return st.fixed_dictionaries(chosen)


# -- changes -----------------------------------------------------------------------------------------------------------


def as_it_is(options: Options) -> Options:
    return options


def to(**changed: Any) -> Change:
    """With these options; ``None``: without it."""
    return lambda options: {name: each for name, each in {**options, **changed}.items() if each is not None}


def times(option: str, factor: int) -> Change:
    return lambda options: {**options, option: options[option] * factor}


def spread(**keys: Any) -> Change:
    """With these keys of ``parallel`` besides, or in the place of those that are there."""

    def change(options: Options) -> Options:
        said = dict(each.split("=") for each in options.get("parallel", "").split(",") if each)
        said |= {name.replace("_", "-"): each for name, each in keys.items()}
        return {**options, "parallel": ",".join(f"{name}={each}" for name, each in said.items())}

    return change


# -- what must hold ----------------------------------------------------------------------------------------------------

EXACT = 1e-6
# The allocator counts rests of blocks that are not worth a split, up to 1 MiB each: they move with the order of calls.
RESTS = 16 << 20


def no_faster(before: Any, after: Any, within: float = EXACT) -> bool:
    return after.iteration_seconds >= before.iteration_seconds * (1 - within)


def no_slower(before: Any, after: Any, within: float = EXACT) -> bool:
    return no_faster(after, before, within)


def clearly_slower(before: Any, after: Any, factor: float = 1.05) -> bool:
    return after.iteration_seconds > factor * before.iteration_seconds


def clearly_less_memory(before: Any, after: Any, factor: float = 0.95) -> bool:
    return in_use(after) < factor * in_use(before)


def no_less_memory(before: Any, after: Any) -> bool:
    return in_use(after) >= in_use(before) - RESTS


def no_more_memory(before: Any, after: Any) -> bool:
    return no_less_memory(after, before)


def in_use(found: Any) -> int:
    """Of the fullest rank, without what the allocator holds back."""
    return max(rank.allocated_bytes for rank in found.ranks)


def same(before: Any, after: Any, within: float = EXACT) -> bool:
    """Time, interval and memory."""
    times = [(one.iteration_seconds, *one.interval_seconds) for one in (before, after)]
    return times[1] == pytest.approx(times[0], rel=within) and same_memory(before, after)


def same_memory(before: Any, after: Any) -> bool:
    return in_use(before) == in_use(after)


def same_flops(before: Any, after: Any) -> bool:
    """Those of the model per sample, which no way to compute it moves."""
    one, other = (found.utilisation.model_flops / found.throughput.samples for found in (before, after))
    return other == pytest.approx(one, rel=EXACT)


def roughly(holds: Callable[..., bool], within: float) -> Callable[[Any, Any], bool]:
    """``holds`` with so much room."""
    return lambda before, after: holds(before, after, within)


def graphed(options: Options) -> Options:
    """Launched at once, so that the GPU rules: more kernels cost a host that is waited for."""
    return {**options, "cuda_graph": True}


def both(*each: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda before, after: all(holds(before, after) for holds in each)


def widths(found: Any) -> tuple[float, float]:
    """Of the interval, below and above the time."""
    low, high = found.interval_seconds
    return found.iteration_seconds / low, high / found.iteration_seconds


def no_surer(before: Any, after: Any, within: float = 0.01) -> bool:
    return all(wide >= narrow * (1 - within) for narrow, wide in zip(widths(before), widths(after), strict=True))
