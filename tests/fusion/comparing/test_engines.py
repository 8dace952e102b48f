"""Every engine on real models against ONNX Runtime; worker processes that crash, hang and spin."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError
from fusion.comparing import engine
from fusion.comparing.engine import ENGINES, EngineSpec, EngineWorkload, Unavailable, select_engines
from fusion.comparing.engine_worker import EngineFailed, Worker
from fusion.model.build_folder import Artifact, TensorInfo, file_digest
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
    return EngineWorkload(model, file_digest(model), inputs, outputs, threads, build, build / "cache")


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


@pytest.mark.parametrize("exact", [True, False])
def test_onnx_runtime_that_checks_others_rounds_no_floats_before_weights_in_bytes(exact, tmp_path):
    """Its default does, and its outputs then contradict FP64; where it is timed it computes as it does by default."""
    from dataclasses import replace

    from onnx import TensorProto, helper, numpy_helper

    from fusion.comparing.onnx_runtime import OnnxRuntimeEngine

    rng = np.random.default_rng(0)
    weight, scale = rng.integers(-127, 128, (64, 32)).astype(np.int8), rng.uniform(0.01, 0.02, 32).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    given, made = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", [4, 64]), ("y", [4, 32]))
    )
    constants = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(scale, "s")]
    graph = helper.make_graph(nodes, "g", given, made, constants)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    session = OnnxRuntimeEngine().prepare(replace(workload_of(path, tmp_path), exact=exact), silent)
    expected = x.astype(np.float64) @ (weight * scale.astype(np.float64))
    error = np.abs(session.run({"x": x})["y"] - expected).max() / np.abs(expected).max()
    assert error < 1e-6 or (not exact and error < 0.1)


# -- real engines ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in ("torch", "torch-bf16") else ())
        for name in sorted(ENGINES)
        if name != "tvm-metaschedule" and not name.endswith("-int8")
    ],
)
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
    tolerance = 0.02 if name.endswith("-bf16") else 1e-6
    assert list(outputs) == ["sum", "file"]
    np.testing.assert_allclose(outputs["sum"], inputs["a"] + inputs["b"], atol=tolerance)
    np.testing.assert_allclose(outputs["file"], np.maximum(inputs["a"] * inputs["b"], 0), atol=tolerance)
    assert durations.shape == (3,) and (durations > 0).all()


@pytest.mark.parametrize("name", ["onnxruntime", "openvino", pytest.param("torch-eager", marks=pytest.mark.thorough)])
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
    from fusion.comparing import pytorch

    def broken(graph, examples):
        raise RuntimeError("no C++ compiler\nlong story")

    monkeypatch.setitem(pytorch.MODES, "Inductor, frozen", broken)
    session = pytorch.BEST.prepare(tiny, silent)
    inputs = random_arrays(tiny.inputs)
    session.bind(inputs)
    assert session.chosen in ("TorchScript, frozen", "eager, channels last")
    assert session.mode.endswith("Inductor, frozen failed: no C++ compiler")
    np.testing.assert_allclose(session.run(inputs)["sum"], inputs["a"] + inputs["b"], rtol=1e-6)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds ``net.onnx``, 3x3 -> ReLU -> depthwise 3x3 -> 1x1 -> average -> dense of 32 channels, and
    ``net-int8.onnx``, the same quantised.
    """
    from onnx import TensorProto, helper, numpy_helper

    from fusion.tuning.quantization import quantize_model

    rng = np.random.default_rng(0)
    weights = {
        "a": rng.normal(size=(32, 3, 3, 3)) / 5,
        "b": rng.normal(size=(32, 1, 3, 3)) / 3,
        "c": rng.normal(size=(32, 32, 1, 1)) / 5,
        "d": rng.normal(size=(10, 32)) / 5,
    }
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["1"], pads=[1] * 4),
        helper.make_node("Relu", ["1"], ["2"]),
        helper.make_node("Conv", ["2", "b"], ["3"], pads=[1] * 4, group=32),
        helper.make_node("Conv", ["3", "c"], ["4"]),
        helper.make_node("GlobalAveragePool", ["4"], ["5"]),
        helper.make_node("Flatten", ["5"], ["6"]),
        helper.make_node("Gemm", ["6", "d"], ["y"], transB=1),
    ]
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])]
    ends += [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])]
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], constants)
    folder = tmp_path_factory.mktemp("layers")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "net.onnx")
    quantize_model(folder / "net.onnx", random=True)
    return folder


LOWER = {"openvino-bf16": "bf16", "torch-bf16": "bfloat16", "openvino-int8": "int8", "onnxruntime-int8": "int8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name == "torch-bf16" else name for name in LOWER]
)
def test_a_lower_precision_is_what_is_computed_in(name: str, layers: Path, tmp_path: Path):
    """The outputs are rounded coarser than FP32 is, by no more than the precision explains, and the mode says so."""
    spec, inputs = ENGINES[name], {"x": np.random.default_rng(1).normal(size=(1, 3, 16, 16)).astype(np.float32)}
    if spec.missing():
        pytest.skip(spec.missing())
    file = "net-int8.onnx" if spec.precision == "int8" else "net.onnx"
    with Worker(ENGINES["onnxruntime"], 1) as worker:
        worker.prepare(workload_of(layers / "net.onnx", tmp_path, 1), timeout=60)
        _, reference = worker.bind(inputs)
    with Worker(spec, 1) as worker:
        try:
            worker.prepare(workload_of(layers / file, tmp_path, 1), timeout=300)
        except Unavailable as reason:
            pytest.skip(str(reason))
        mode, outputs = worker.bind(inputs)
        again = worker.run(inputs)
    assert LOWER[name] in mode and outputs["y"].dtype == np.float32
    error = np.abs(outputs["y"] - reference["y"]).max() / np.abs(reference["y"]).max()
    assert 1e-5 < error < 0.1
    np.testing.assert_array_equal(again["y"], outputs["y"])


@pytest.mark.parametrize("name", ["openvino", pytest.param("torch-eager", marks=pytest.mark.thorough)])
def test_engines_in_fp32_are_not_given_bf16_by_the_environment(name: str, layers: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    spec, inputs = ENGINES[name], {"x": np.random.default_rng(1).normal(size=(1, 3, 16, 16)).astype(np.float32)}
    if spec.missing():
        pytest.skip(spec.missing())
    found = []
    for each in (ENGINES["onnxruntime"], spec):
        with Worker(each, 1) as worker:
            worker.prepare(workload_of(layers / "net.onnx", tmp_path, 1), timeout=60)
            found.append(worker.bind(inputs)[1]["y"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5 * np.abs(found[0]).max())


@pytest.mark.parametrize("name", ["openvino-int8", "onnxruntime-int8"])
def test_an_engine_that_computes_no_layer_in_integers_is_unavailable(name: str, layers: Path, tmp_path: Path):
    spec = ENGINES[name]
    if spec.missing():
        pytest.skip(spec.missing())
    with Worker(spec, 1) as worker, pytest.raises(Unavailable, match="computes none of the . layers in int8"):
        worker.prepare(workload_of(layers / "net.onnx", tmp_path, 1), timeout=60)


def test_openvino_without_the_hinted_precision_is_unavailable(layers: Path, tmp_path: Path, monkeypatch):
    """As on a CPU without BF16: the hint reads back as FP32, or no layer follows it."""
    pytest.importorskip("openvino")
    from fusion.comparing import open_vino

    def get_property(name: str):
        return types.SimpleNamespace(to_string=lambda: "f32")

    compiled = types.SimpleNamespace(get_property=get_property)
    core = types.SimpleNamespace(compile_model=lambda model, device, settings: compiled)
    with pytest.raises(Unavailable, match="OpenVINO runs f32, not bf16, on this CPU"):
        open_vino._compile(core, None, "bf16", 1)
    assert open_vino._compile(core, None, "f32", 1) is compiled
    workload = workload_of(layers / "net.onnx", tmp_path, 1)
    monkeypatch.setattr(open_vino, "_precisions", lambda compiled: {"f32": 4})
    monkeypatch.setattr(open_vino, "_compile", lambda core, model, hint, threads: None)
    with pytest.raises(Unavailable, match="OpenVINO computes none of the 4 layers in bf16 on this CPU"):
        open_vino.BF16.prepare(workload, silent)


def test_the_share_of_layers_is_told_where_it_is_not_all():
    from fusion.comparing.open_vino import _described

    assert _described({"bf16": 52, "f32": 1}, "bf16", ("bf16",)) == "bf16 in 52 of 53 layers"
    assert _described({"bf16": 3}, "bf16", ("bf16",)) == "bf16"
    assert _described({"u8": 3, "i8": 1, "f32": 1}, "f32", ("i8", "u8")) == "int8 in 4 of 5 layers, the rest f32"
    assert _described({"f32": 4}, "f32", None) == "f32"
    assert _described({"u8": 4}, "f32", None) == "int8, the rest f32"  # FP32 asked for a quantised model


def test_peers_of_a_precision_are_other_engines_that_need_no_tuning():
    from fusion.comparing.engine import peers_of

    assert peers_of("bfloat16") == ("openvino-bf16", "torch-bf16")
    assert set(peers_of("int8")) == {"openvino-int8", "onnxruntime-int8"}
    assert {"onnxruntime", "openvino", "torch"} <= set(peers_of("float32"))
    assert not {"tuned", "tvm-unfused", "tvm-metaschedule"} & set(peers_of("float32"))


def test_the_fastest_mode_is_chosen():
    calls = {"slow": lambda: time.sleep(0.03), "fast": lambda: time.sleep(0.001)}
    assert engine.fastest(calls) == "fast"


def test_a_mode_without_hope_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    seconds = {"a": 1.0, "b": 1.5, "slow": 100.0}
    tried: list[str] = []

    def block(name: str) -> float:
        tried.append(name)
        return seconds[name]

    monkeypatch.setattr(engine, "_block", block)
    assert engine.fastest({name: name for name in seconds}) == "a"
    assert tried.count("slow") == 1 and tried.count("a") == tried.count("b") == engine.ROUNDS


def test_metaschedule_loads_what_is_cached_and_tunes_otherwise(
    tiny: EngineWorkload, tiny_build: Artifact, tmp_path: Path
):
    import dataclasses
    import shutil

    from fusion.comparing import apache_tvm

    workload = dataclasses.replace(tiny, cache=tmp_path, trials_per_task=7)
    tuned = []

    class Exported:
        def export_library(self, path: str) -> None:
            shutil.copy(tiny_build.directory / "model.so", path)

    def tune_stock(mod, cpu, trials, directory, progress):
        tuned.append((trials, cpu.threads))
        return Exported()

    module = types.ModuleType("schedules.tuning.stock_meta_schedule")
    module.tune_stock = tune_stock
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "schedules.tuning.stock_meta_schedule", module)
        inputs = random_arrays(workload.inputs)
        for _ in range(2):
            session = apache_tvm.METASCHEDULE.prepare(workload, silent)
            np.testing.assert_allclose(session.run(inputs)["sum"], inputs["a"] + inputs["b"], rtol=1e-6)
        assert tuned == [(7, 2)]
        apache_tvm.METASCHEDULE.prepare(dataclasses.replace(workload, trials_per_task=8), silent)
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
        assert 0.25 < time.perf_counter() - start < 60


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
    from fusion.comparing import engine_worker as module

    with Worker(fake("HANGING"), 2) as worker:
        worker.prepare(tiny, 60)
        worker.bind(random_arrays(tiny.inputs))
        monkeypatch.setattr(module, "CALL_TIMEOUT_SECONDS", 0.3)
        with pytest.raises(EngineFailed, match="no answer"):
            worker.block(0, 1, 0.0)
        assert worker._process.returncode is not None


def test_an_engine_dies_with_a_parent_that_is_killed(tmp_path: Path):
    code = (
        "import os, signal\nfrom fusion.comparing.engine import EngineSpec\n"
        "from fusion.comparing.engine_worker import Worker\n"
        "from fusion.comparing.engine import EngineWorkload\n"
        "worker = Worker(EngineSpec('hanging', 'fake_engines:HANGING', (), ''), 1)\n"
        "worker.prepare(None, 60)\nworker.bind({'a': 0, 'b': 0})\n"
        "worker._connection.send(('block', (0, 1, 0.0)))\n"  # now it sleeps for an hour
        "print(worker._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])])}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    stat = Path("/proc") / ended.stdout.strip() / "stat"
    deadline = time.monotonic() + 60
    while stat.exists() and " Z " not in stat.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not stat.exists() or " Z " in stat.read_text()
