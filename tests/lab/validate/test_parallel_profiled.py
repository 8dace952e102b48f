"""Parts put together: condensed ones, and ones as a profile of single layers shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.cost_model import CostModel, Estimate
from costmodel.operators.device_work import Gemm
from e2e.parallelism.pieces import LayerCollective, Work
from e2e.step.execution_graph import CallInfo, Duration, HostWork
from lab.data.data_folder import data_folder
from lab.validate import vtrain
from lab.validate.vtrain import Profiler, standing_start

DATA = data_folder()
CALLS = {0: CallInfo(0, "aten::mm", "forward")}


class OneSecond(CostModel):
    """Every kernel takes 1 s, every transfer 5 s."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds

    def estimate(self, operators: Sequence[Any]) -> list[Estimate]:
        return [Estimate(self.seconds, self.seconds, self.seconds, "compute", {}, "fitted") for _ in operators]


class Host:
    """The gap before an operator and the launch 0.25 s each, all else nothing."""

    level = 1.0

    def __init__(self, each: float = 0.25) -> None:
        self.each = each

    def seconds(self, kind: Any, name: str, records: float | None = None) -> float:
        return self.each if kind in ("T1", "T4") else 0.0


def kernels(count: int) -> tuple[HostWork | Work, ...]:
    one = (HostWork("T1", 0), HostWork("T2", 0), Work("aten::mm", "kernel", (Gemm(1, 8, 8, 8),), 0), HostWork("T3", 0))
    return one * count


def test_standing_start_waits_for_the_first_launch_then_for_the_device() -> None:
    """Host 0.5 s a kernel, device 1 s: 0.5 + 3. The other way round: 3 x 2 s of host, 1 s of the last kernel."""
    for each, seconds in ((0.25, 0.5 + 3.0), (1.0, 3 * 2.0 + 1.0)):
        items = Profiler(OneSecond(), Host(each), OneSecond(), tp=1).priced(kernels(3), CALLS)
        assert standing_start(items) == pytest.approx(seconds)


def test_profiled_parts_add_transfers() -> None:
    profiler = Profiler(OneSecond(), Host(), OneSecond(5.0), tp=2)
    (whole,) = profiler.items((*kernels(3), LayerCollective("all_reduce", 8, 0)), CALLS)
    assert isinstance(whole, Work) and whole.duration is not None
    assert whole.duration.seconds == pytest.approx(3.5 + 5.0)
    assert whole.launch == Duration(0.0, 0.0, 0.0, "host", "fitted")


def table(tmp_path: Path, text: str) -> Path:
    (tmp_path / vtrain.FOLDER).mkdir()
    (tmp_path / vtrain.FOLDER / "iteration_times_4_gpus.csv").write_text(text, encoding="utf-8")
    return tmp_path


def test_several_nodes_run_layers_again_and_have_four_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the source's configurations of them say; on one node nothing is recomputed."""

    def case(tp: int, dp: int) -> vtrain.VtrainCase:
        return vtrain.VtrainCase(tp * dp, 2 * dp, 1, 256, 16, 4, 64, tp, dp, 1, 1.0)

    assert case(4, 2).spec.recompute == "none" and case(8, 2).spec.recompute == "full"

    def forward_passes(case: vtrain.VtrainCase) -> int:
        return sum(task.name == "part 1" for task in vtrain.Predictor().graph(case).ranks[0].tasks)

    # 2 micro-batches; two of the four layers are like the captured one from the middle: forward, backward (, again).
    assert forward_passes(case(4, 2)) == 2 * 2 * 2
    assert forward_passes(case(8, 2)) == 2 * 2 * 3
    alone, slow = vtrain.Predictor().seconds(case(4, 2)), vtrain.Predictor().seconds(case(8, 2))
    monkeypatch.setattr(vtrain, "NETWORK", "infiniband-hdr:8")
    assert vtrain.Predictor().seconds(case(8, 2)) < slow
    assert vtrain.Predictor().seconds(case(4, 2)) == alone


def made_up(layers: int, micro_batches: int) -> vtrain.VtrainCase:
    seconds = 1.0 + 0.1 * layers + 0.2 * micro_batches + 0.3 * layers * micro_batches
    return vtrain.VtrainCase(2, micro_batches, 1, 64, 4, layers, 128, 2, 1, 1, seconds)


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    cases = [made_up(layers, count) for layers in (2, 4, 6) for count in (1, 2, 4)]
    report = vtrain.VtrainReport(cases, [case.seconds * 1.1 for case in cases])
    everything = report.figures()["all"]
    assert everything.count == 9 and math.isclose(everything.mape, 0.1) and math.isclose(everything.bias, 0.1)
    assert set(report.figures()) >= {"2 GPUs", "tp=2 dp=1 pp=1"}
    assert len(report.record()["cases"]) == 9
    report.render()
    assert "2 GPUs" in capsys.readouterr().out
    assert vtrain.vtrain_section(DATA, "t4/") is None


@pytest.mark.thorough
@pytest.mark.skipif(not (DATA / vtrain.FOLDER).is_dir(), reason="the shared data are not here")
def test_published_iterations() -> None:
    """Half of every sixtieth within 7 %; the whole table is a section of ``python -m lab.validate``."""
    everything = vtrain.read_cases(DATA)
    assert len(everything) >= 720
    report = vtrain.validate(everything[::60])
    assert np.median(np.abs(report.errors)) < 0.07
