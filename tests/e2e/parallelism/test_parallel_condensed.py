"""A step of runs of kernels takes as long as one of single kernels, and tells as much, on every GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache

import pytest

from costmodel.machines.cluster import load_cluster
from costmodel.machines.machine_file import PACKAGED_DIRECTORY, load_machine
from e2e.explain.prediction import Prediction
from e2e.explain.predictor import Setting, predict_graph
from e2e.parallelism import ParallelGraph, build_parallel_graph, parse_parallel
from e2e.parallelism.rewrites import Condenser
from e2e.price.host_overheads import load_overheads
from e2e.step.options import StepOptions

GPUS = sorted(path.stem for path in (PACKAGED_DIRECTORY / "gpu").glob("*.yaml"))
# A GPU of every generation, with its clocks held and without.
KINDS = sorted(
    {(load_machine(name).chip().architecture, load_machine(name).chip().power_limited): name for name in GPUS}.values()
)
POWER_LIMITED = [name for name in GPUS if load_machine(name).chip().power_limited]
CONFIG = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 6, "n_head": 16, "n_positions": 512, "vocab_size": 8192}
# So long that the delay of one run, which the host prepares while the device waits, is nothing beside it.
STEP = StepOptions(batch_size=64, sequence_length=512)
Built = tuple[ParallelGraph, ParallelGraph]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """The same step kernel by kernel, and in runs however few kernels there are."""
    folder = tmp_path_factory.mktemp("condensed")
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")

    @lru_cache
    def built(spread: str) -> Built:
        spec = parse_parallel(spread)
        with pytest.MonkeyPatch.context() as patch:
            whole = build_parallel_graph(path, spec, STEP, captures=folder)
            patch.setattr("e2e.parallelism.parallel_graph.MANY_KERNELS", 500)
            condensed = build_parallel_graph(path, spec, STEP, captures=folder, condenser=Condenser(load_overheads()))
        assert any("in runs of" in line for line in condensed.warnings)
        assert len(condensed.graph.ranks[0].tasks) < len(whole.graph.ranks[0].tasks) / 2
        return whole, condensed

    return built


def predicted(built: Built, gpu: str, spread: float | None = None) -> tuple[Prediction, Prediction]:
    setting = Setting(load_machine(gpu), load_overheads())
    gpus = sum(built[0].graph.multiplicity.values())
    whole, condensed = (
        predict_graph(each.graph, setting, load_cluster(gpu, gpus), each.memory, speed_spread=spread).prediction
        for each in built
    )
    return whole, condensed


def check_alike(whole: Prediction, condensed: Prediction) -> None:
    assert condensed.iteration_seconds == pytest.approx(whole.iteration_seconds, rel=1e-3)
    assert condensed.interval_seconds == pytest.approx(whole.interval_seconds, rel=2e-3)
    assert condensed.breakdown.keys() == whole.breakdown.keys()
    for name, seconds in whole.breakdown.items():
        assert condensed.breakdown[name] == pytest.approx(seconds), name
    assert condensed.coverage == pytest.approx(whole.coverage)
    assert condensed.overheads == pytest.approx(whole.overheads)
    assert condensed.kernels == whole.kernels


@pytest.mark.parametrize("gpu", KINDS)
def test_runs_take_as_long_as_their_kernels(both: Callable[[str], Built], gpu: str) -> None:
    check_alike(*predicted(both("dp=2,micro-batches=4"), gpu))


@pytest.mark.parametrize("gpu", POWER_LIMITED)
def test_runs_of_several_stages_have_the_mixture_of_the_whole_step(both: Callable[[str], Built], gpu: str) -> None:
    """The clock depends on it, and stages, layers and micro-batches repeat the parts that are condensed."""
    check_alike(*predicted(both("tp=2,pp=2,micro-batches=4"), gpu))


def test_runs_on_a_slower_gpu(both: Callable[[str], Built]) -> None:
    check_alike(*predicted(both("dp=2,micro-batches=4"), "l4", 0.05))
