"""Every engine on real models against ONNX Runtime; worker processes that crash, hang and spin."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError
from fusion.artifact.build_folder import Artifact, TensorInfo, digest
from fusion.comparing.engines import best
from fusion.comparing.engines.base import EngineWorkload, Unavailable
from fusion.comparing.engines.engine_table import ENGINES, EngineSpec, select_engines
from fusion.comparing.engines.engine_worker import EngineFailed, Worker
from fusion.model.named_arrays import random_arrays

onnx = pytest.importorskip("onnx")
HERE = Path(__file__).parent


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch):
    """``fake("CRASHING")``: the spec of an engine of ``fake_engines.py``."""
    monkeypatch.syspath_prepend(str(HERE))
    return lambda name: EngineSpec(name.lower(), f"fake_engines:{name}", (), "none")


def workload_of(model: Path, build: Path, threads: int = 2) -> EngineWorkload:
    loaded = onnx.load(model)

    def infos(values, extents):
        return tuple(
            TensorInfo(value.name, tuple(d.dim_value or extents for d in value.type.tensor_type.shape.dim), "float32")
            for value in values
        )

    inputs, outputs = infos(loaded.graph.input, 2), infos(loaded.graph.output, 2)
    return EngineWorkload(model, digest(model), inputs, outputs, threads, build, build / "cache")


@pytest.fixture
def tiny(tiny_model: Path, tiny_build: Artifact) -> EngineWorkload:
    return workload_of(tiny_model, tiny_build.directory)


def silent(_: str) -> None:
    return None


# -- names -----------------------------------------------------------------------------------------------------------


def test_tuned_comes_first_once_and_the_others_in_order():
    names = [spec.name for spec in select_engines(["openvino", "tuned", "onnxruntime", "openvino"])]
    assert names == ["tuned", "openvino", "onnxruntime"]


def test_an_unknown_engine_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="no such engine; there are tuned, .*openvino"):
        select_engines(["tensorflow"])


def test_an_engine_that_is_not_installed_names_package_and_extra():
    spec = EngineSpec("x", "x:X", ("numpy", "package_that_is_not_there"), "peers")
    assert spec.missing() == "package_that_is_not_there not installed: pip install -e '.[peers]'"
    assert EngineSpec("x", "x:X", ("numpy",), "peers").missing() is None


# -- real engines ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ENGINES) - {"tvm-metaschedule"}))
def test_every_engine_computes_what_onnx_runtime_computes(name: str, tiny: EngineWorkload):
    spec = ENGINES[name]
    if spec.missing():
        pytest.skip(spec.missing())
    inputs = random_arrays(tiny.inputs)
    with Worker(spec, tiny.threads) as worker:
        try:
            worker.prepare(tiny, timeout=120)
        except Unavailable as reason:
            pytest.skip(str(reason))
        mode, outputs = worker.bind(inputs)
        durations = worker.block(warmup=1, calls=3, seconds=0.0)
    assert mode
    tolerance = 0.02 if name == "openvino-bf16" else 1e-6
    assert list(outputs) == ["sum", "file"]
    np.testing.assert_allclose(outputs["sum"], inputs["a"] + inputs["b"], atol=tolerance)
    np.testing.assert_allclose(outputs["file"], np.maximum(inputs["a"] * inputs["b"], 0), atol=tolerance)
    assert durations.shape == (3,) and (durations > 0).all()


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", "opencv", "torch-eager"])
def test_symbolic_dimensions_take_the_shapes_in_use(name: str, tmp_path: Path):
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["n", 3]) for end in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    spec = ENGINES[name]
    if spec.missing():
        pytest.skip(spec.missing())
    workload = workload_of(tmp_path / "m.onnx", tmp_path)
    with Worker(spec, 1) as worker:
        worker.prepare(workload, timeout=60)
        _, outputs = worker.bind({"x": np.array([[1, -1, 2], [3, 4, -5]], np.float32)})
    assert outputs["y"].tolist() == [[1, 0, 2], [3, 4, 0]]


def test_a_torch_mode_that_cannot_compile_is_named_and_the_best_of_the_rest_is_used(tiny: EngineWorkload, monkeypatch):
    pytest.importorskip("torch")
    from fusion.comparing.engines import pytorch

    def broken(graph, examples):
        raise RuntimeError("no C++ compiler\nlong story")

    monkeypatch.setitem(pytorch.MODES, "Inductor, frozen", broken)
    session = pytorch.BEST.prepare(tiny, silent)
    inputs = random_arrays(tiny.inputs)
    session.bind(inputs)
    assert session.chosen in ("TorchScript, frozen", "eager, channels last")
    assert session.mode.endswith("Inductor, frozen failed: no C++ compiler")
    np.testing.assert_allclose(session.run(inputs)["sum"], inputs["a"] + inputs["b"], rtol=1e-6)


def test_the_fastest_mode_is_chosen():
    calls = {"slow": lambda: time.sleep(0.003), "fast": lambda: time.sleep(0.001)}
    assert best.fastest(calls) == "fast"


def test_metaschedule_loads_what_is_cached_and_tunes_otherwise(
    tiny: EngineWorkload, tiny_build: Artifact, tmp_path: Path
):
    import dataclasses
    import shutil
    import types

    from fusion.comparing.engines import stock_tvm

    workload = dataclasses.replace(tiny, cache=tmp_path, trials_per_task=7)
    tuned = []

    class Exported:
        def export_library(self, path: str) -> None:
            shutil.copy(tiny_build.directory / "model.so", path)

    def tune_stock(mod, cpu, trials, directory, progress):
        tuned.append((trials, cpu.threads))
        return Exported()

    module = types.ModuleType("schedules.peers.stock_meta_schedule")
    module.tune_stock = tune_stock
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "schedules.peers.stock_meta_schedule", module)
        inputs = random_arrays(workload.inputs)
        for _ in range(2):
            session = stock_tvm.METASCHEDULE.prepare(workload, silent)
            np.testing.assert_allclose(session.run(inputs)["sum"], inputs["a"] + inputs["b"], rtol=1e-6)
        assert tuned == [(7, 2)]
        stock_tvm.METASCHEDULE.prepare(dataclasses.replace(workload, trials_per_task=8), silent)
        assert tuned == [(7, 2), (8, 2)]


# -- worker processes ------------------------------------------------------------------------------------------------


def test_threads_reach_the_libraries_and_progress_the_parent(fake, tiny: EngineWorkload):
    heard: list[str] = []
    with Worker(fake("SETTINGS"), threads=3) as worker:
        worker.prepare(tiny, 60, heard.append)
        mode, _ = worker.bind(random_arrays(tiny.inputs))
    assert mode == "OMP 3, TVM 3, 2 threads"
    assert heard == ["thinking"]


def test_a_block_has_enough_calls_and_lasts_long_enough(fake, tiny: EngineWorkload):
    with Worker(fake("GOOD"), 2) as worker:  # one call sleeps 2 ms
        worker.prepare(tiny, 60)
        worker.bind(random_arrays(tiny.inputs))
        assert len(worker.block(0, 7, 0.0)) == 7
        long = worker.block(0, 1, 0.1)
        assert long.sum() >= 0.09 and len(long) > 3
        assert long.min() >= 0.002


def test_a_block_is_answered_only_when_the_threads_of_the_engine_sleep(fake, tiny: EngineWorkload):
    with Worker(fake("SPINNING"), 2) as worker:  # a thread stays busy for 0.3 s after a call
        worker.prepare(tiny, 60)
        worker.bind(random_arrays(tiny.inputs))
        start = time.perf_counter()
        worker.block(0, 1, 0.0)
        assert 0.25 < time.perf_counter() - start < 1.5


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("UNAVAILABLE", Unavailable, "no such instruction here"),
        ("RAISING", EngineFailed, "ValueError: operator Foo is unknown$"),
        ("EXITING", EngineFailed, r"its process died \(exit status 3\): cannot load libfoo.so"),
    ],
)
def test_what_goes_wrong_in_preparation_is_one_line(fake, tiny: EngineWorkload, name: str, error: type, words: str):
    with Worker(fake(name), 2) as worker, pytest.raises(error, match=words):
        worker.prepare(tiny, 60)


def test_a_crash_names_its_signal(fake, tiny: EngineWorkload):
    with Worker(fake("CRASHING"), 2) as worker:
        worker.prepare(tiny, 60)
        worker.bind(random_arrays(tiny.inputs))
        with pytest.raises(EngineFailed, match="killed by SIGSEGV"):
            worker.block(0, 1, 0.0)


def test_a_hang_is_ended_with_its_process(fake, tiny: EngineWorkload, monkeypatch: pytest.MonkeyPatch):
    from fusion.comparing.engines import engine_worker as module

    with Worker(fake("HANGING"), 2) as worker:
        worker.prepare(tiny, 60)
        worker.bind(random_arrays(tiny.inputs))
        monkeypatch.setattr(module, "CALL_TIMEOUT_SECONDS", 0.3)
        with pytest.raises(EngineFailed, match="no answer"):
            worker.block(0, 1, 0.0)
        assert worker._process.returncode is not None


def test_an_engine_dies_with_a_parent_that_is_killed(tmp_path: Path):
    code = (
        "import os, signal\nfrom fusion.comparing.engines.engine_table import EngineSpec\n"
        "from fusion.comparing.engines.engine_worker import Worker\n"
        "from fusion.comparing.engines.base import EngineWorkload\n"
        "worker = Worker(EngineSpec('hanging', 'fake_engines:HANGING', (), ''), 1)\n"
        "worker.prepare(None, 60)\nworker.bind({'a': 0, 'b': 0})\n"
        "worker._connection.send(('block', (0, 1, 0.0)))\n"  # now it sleeps for an hour
        "print(worker._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    stat = Path("/proc") / ended.stdout.strip() / "stat"
    deadline = time.monotonic() + 5
    while stat.exists() and " Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stat.exists() or " Z " in stat.read_text()
