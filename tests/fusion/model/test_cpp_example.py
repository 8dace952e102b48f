"""The C++ header and its example, compiled with what their page says and run on builds of template kernels."""

# ruff: noqa: E402

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
from tvm.relax import op

from fusion.model.build_folder import Manifest, ProfileBuild, write_artifact, write_profiles
from fusion.model.conv_graph import unfused_plan
from fusion.model.named_arrays import TensorInfo
from fusion.relax.extract import extract_graph
from fusion.relax.layout_lowering import lower
from fusion.relax.machine_code import build_executable
from fusion.tuning.network import complete_configs
from schedules.tuning.kernel_ranking import KernelGuesses
from tests.fusion.relax_models import CPU, assert_close, inputs_of, module, stock

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "run_model.cpp"
# What a program of one's own may do with the header; prints a line for each question.
QUESTIONS = r"""
#include <tuned_model.h>
#include <iostream>

template <typename Call>
void Told(Call call) {
  try { call(); std::cout << "no error\n"; } catch (const fusion::Error& error) { std::cout << error.what() << "\n"; }
}

int main(int, char** argv) {
  const fusion::TunedModel model(argv[1], 1);
  const std::vector<fusion::TensorInfo>& inputs = model.inputs();
  std::map<std::string, fusion::Array> named;
  for (const fusion::TensorInfo& each : inputs) named.emplace(each.name, each.zeros());
  for (const auto& [name, output] : model.run_named(named)) std::cout << name << " " << output.dtype() << "\n";
  Told([&] { model.run({inputs[0].zeros()}); });
  Told([&] { model.run({fusion::Array("uint8", inputs[0].shape), inputs[1].zeros()}); });
  Told([&] { named.erase(inputs[0].name); model.run_named(named); });
  Told([&] { inputs[0].zeros().data<double>(); });
  Told([&] { fusion::Array("floaty", {1}); });
  Told([&] { fusion::Array("float32", {-1}); });
  const fusion::TunedModel profiles(argv[2]);
  Told([&] { profiles.run({fusion::Array("float32", {1, 3, 9, 9})}); });
  Told([&] { profiles.run({fusion::Array("float32", {1, 3, 8, 8})}); });
}
"""


def tvm_ffi_config(option: str) -> list[str]:
    command = [sys.executable, "-m", "tvm_ffi.config", option]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def compiled(source: Path, path: Path) -> Path:
    """A program beside the two libraries that it needs, as it is shipped."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    libraries = Path(tvm.__file__).parent / "lib"
    command = [compiler, "-std=c++17", "-O0", "-Wall", "-Werror", str(source), "-o", str(path)]
    command += [f"-I{ROOT / 'fusion' / 'model'}", *tvm_ffi_config("--cxxflags"), f"-L{libraries}"]
    command += [*tvm_ffi_config("--ldflags"), "-Wl,--no-as-needed", "-ltvm_runtime", *tvm_ffi_config("--libs")]
    done = subprocess.run([*command, "-Wl,-rpath,$ORIGIN"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for library in (libraries / "libtvm_runtime.so", Path(tvm_ffi_config("--libdir")[0]) / "libtvm_ffi.so"):
        if not (path.parent / library.name).exists():
            (path.parent / library.name).symlink_to(library)
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(EXAMPLE, tmp_path_factory.mktemp("cpp") / "run_model")


def run(program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """With no variable of the environment: nothing of this machine's settings helps a program at a customer's."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, env={}, check=False)


def executable(mod: tvm.IRModule):
    plan = unfused_plan(extract_graph(mod))
    return build_executable(lower(mod, plan, complete_configs(plan, KernelGuesses(CPU), {}), CPU), CPU)


def manifest(inputs: tuple[TensorInfo, ...], outputs: tuple[TensorInfo, ...]) -> Manifest:
    return Manifest("m.onnx", "0", inputs, outputs, CPU.mcpu, (), 2, "0")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory):
    """A build of one input and one output, the same for another shape, and the module that it computes."""

    def body(net, x):
        return net(op.mean(net.conv(net.relu6(net.conv(x, 24, 3)), 16), [2, 3], True))

    folder = tmp_path_factory.mktemp("network")
    builds = []
    for shape in ((1, 3, 17, 15), (1, 3, 9, 9)):
        made = manifest((TensorInfo("image", shape, "float32"),), (TensorInfo("scores", (1, 16, 1, 1), "float32"),))
        name = "x".join(map(str, shape))
        builds.append(ProfileBuild(name, made, {"model.so": executable(module(shape, body))}, {}))
    write_profiles(folder, builds, {})
    return folder, module((1, 3, 17, 15), body)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build of two inputs and three outputs, not all of them of floating point."""

    def body(net, x, y):
        added = net(op.add(net.conv(x, 8, 3), y))
        return added, net(op.astype(op.argmax(added, 1), "int64")), net(op.less(y, net(op.nn.relu(y))))

    shapes = (1, 3, 9, 7), (1, 8, 9, 7)
    inputs = TensorInfo("image", shapes[0], "float32"), TensorInfo("offset", shapes[1], "float32")
    outputs = (
        TensorInfo("map", shapes[1], "float32"),
        TensorInfo("class", (1, 9, 7), "int64"),
        TensorInfo("below", shapes[1], "bool"),
    )
    folder = tmp_path_factory.mktemp("several")
    write_artifact(folder, manifest(inputs, outputs), {"model.so": executable(module(shapes[0], body, shapes[1]))}, {})
    return folder


def test_it_computes_what_the_network_does(program: Path, network, tmp_path: Path):
    folder, mod = network
    (image,) = inputs_of(mod)
    image.tofile(tmp_path / "input.bin")
    done = run(program, folder / "1x3x17x15", tmp_path / "input.bin", tmp_path / "output.bin")
    assert done.returncode == 0 and "16 float32 written" in done.stdout, done.stderr
    assert_close([np.fromfile(tmp_path / "output.bin", np.float32).reshape(1, 16, 1, 1)], stock(mod, [image]))


def test_every_output_is_written_in_its_own_type(program: Path, several: Path, tmp_path: Path):
    random = np.random.default_rng(3)
    image, offset = (random.standard_normal(size, np.float32) for size in ((1, 3, 9, 7), (1, 8, 9, 7)))
    files = [tmp_path / name for name in ("image", "offset", "map", "class", "below")]
    image.tofile(files[0])
    offset.tofile(files[1])
    done = run(program, several, *files)
    assert done.returncode == 0 and "63 int64 written" in done.stdout, done.stderr
    found = np.fromfile(files[2], np.float32).reshape(1, 8, 9, 7)
    assert np.array_equal(np.fromfile(files[3], np.int64).reshape(1, 9, 7), found.argmax(1))
    assert np.array_equal(np.fromfile(files[4], bool).reshape(offset.shape), offset < 0)
    done = run(program, several, *files[:3])
    assert done.returncode == 2 and "3 files are given" in done.stderr and "output class: int64[1,9,7]" in done.stderr


def test_what_is_wrong_is_told_in_one_line(several: Path, network, tmp_path: Path):
    profiles, _ = network
    (tmp_path / "questions.cpp").write_text(QUESTIONS)
    done = run(compiled(tmp_path / "questions.cpp", tmp_path / "questions"), several, profiles)
    assert done.returncode == 0, done.stderr
    takes = f"{several}: the model takes image: float32[1,3,9,7] offset: float32[1,8,9,7]; given:"
    assert done.stdout.splitlines() == [
        "below bool",
        "class int64",
        "map float32",
        f"{takes} float32[1,3,9,7]",
        f"{takes} uint8[1,3,9,7] float32[1,8,9,7]",
        f"{several}: input image: float32[1,3,9,7] is missing",
        "an array of float32 is read as another type",
        "floaty: no data type; one is for example float32",
        "shape -1: sizes are 0 or more",
        "no error",
        f"{profiles}: the model takes image: float32[1,3,17,15]; or image: float32[1,3,9,9]; given: float32[1,3,8,8]",
    ]


def test_files_and_builds_that_do_not_fit_are_refused_by_name(program: Path, network, tmp_path: Path):
    folder, mod = network[0] / "1x3x17x15", network[1]
    np.zeros(3, np.float32).tofile(tmp_path / "short")
    inputs_of(mod)[0].tofile(tmp_path / "input")

    def refused(*arguments: str | Path) -> str:
        done = run(program, *arguments)
        assert done.returncode == 2 and not done.stdout, done
        return done.stderr

    text = refused(folder, tmp_path / "short", tmp_path / "output")
    assert "short: cannot be read, or does not hold 765 float32" in text
    text = refused(folder, tmp_path / "input", tmp_path / "none" / "output")
    assert "none/output: cannot be written" in text
    assert "it has no manifest.json" in refused(tmp_path, tmp_path / "input", tmp_path / "output")
    assert "usage" in refused(folder)

    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "model.so").write_bytes(b"no library")
    assert f"{damaged}: cannot be loaded: " in refused(damaged, tmp_path / "input", tmp_path / "output")
    fields = json.loads((damaged / "manifest.json").read_text())
    for changed, said in (
        ({"cpu_flags": ["avx9000"]}, "this CPU lacks avx9000"),
        ({"inputs": 3}, "cannot be loaded: "),
        ({"threads": "two"}, "cannot be loaded: "),
        ({"format": 99}, "no manifest of format 1"),
        ({"profiles": {"../elsewhere": "0"}}, "damaged"),
    ):
        (damaged / "manifest.json").write_text(json.dumps(fields | changed))
        assert said in refused(damaged, tmp_path / "input", tmp_path / "output")
    (damaged / "manifest.json").write_text("{")
    assert "cannot be loaded: " in refused(damaged, tmp_path / "input", tmp_path / "output")
