"""The C++ example, compiled with what its page says and run on a model of template kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tvm = pytest.importorskip("tvm")
sys.path.insert(0, str(Path(__file__).parents[1]))

from relax_models import CPU, assert_close, inputs_of, module, stock  # noqa: E402
from tvm.relax import op  # noqa: E402

from fusion.acceptance.tune_job import complete_configs  # noqa: E402
from fusion.model.selection import unfused_plan  # noqa: E402
from fusion.relax.extract import extract_graph  # noqa: E402
from fusion.relax.layout_lowering import lower  # noqa: E402
from fusion.relax.machine_code import build  # noqa: E402
from schedules.tuning.kernel_guesses import KernelGuesses  # noqa: E402

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "run_model.cpp"


def tvm_ffi_config(option: str) -> list[str]:
    command = [sys.executable, "-m", "tvm_ffi.config", option]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    path = tmp_path_factory.mktemp("cpp") / "run_model"
    libraries = Path(tvm.__file__).parent / "lib"
    command = [compiler, "-std=c++17", "-O0", "-Wall", "-Werror", str(EXAMPLE), "-o", str(path)]
    command += [*tvm_ffi_config("--cxxflags"), f"-L{libraries}", *tvm_ffi_config("--ldflags")]
    command += ["-Wl,--no-as-needed", "-ltvm_runtime", *tvm_ffi_config("--libs")]
    command += [f"-Wl,-rpath,{libraries}:{tvm_ffi_config('--libdir')[0]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory):
    """A small network of template kernels as a shared library, and the module that it computes."""
    mod = module((1, 3, 17, 15), lambda net, x: net(op.mean(net.conv(net.relu6(net.conv(x, 24, 3)), 16), [2, 3], True)))
    plan = unfused_plan(extract_graph(mod))
    path = tmp_path_factory.mktemp("network") / "model.so"
    build(lower(mod, plan, complete_configs(plan, KernelGuesses(CPU), {}), CPU), CPU).export_library(str(path))
    return path, mod


def run(program: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TVM_NUM_THREADS": "2"}
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )  # fmt: skip


def test_it_computes_what_the_network_does(program: Path, library, tmp_path: Path):
    path, mod = library
    (image,) = inputs_of(mod)
    image.tofile(tmp_path / "input.f32")
    done = run(program, path, "1,3,17,15", tmp_path / "input.f32", tmp_path / "output.f32", "2")
    assert done.returncode == 0 and "16 floats written" in done.stdout, done.stderr
    output = np.fromfile(tmp_path / "output.f32", np.float32).reshape(1, 16, 1, 1)
    assert_close([output], stock(mod, [image]))


def test_the_library_of_the_shape_is_found_in_a_build(program: Path, library, tmp_path: Path):
    path, mod = library
    (tmp_path / "build" / "1x3x17x15").mkdir(parents=True)
    shutil.copyfile(path, tmp_path / "build" / "1x3x17x15" / "model.so")
    (image,) = inputs_of(mod)
    image.tofile(tmp_path / "input.f32")
    done = run(program, tmp_path / "build", "1,3,17,15", tmp_path / "input.f32", tmp_path / "output.f32", "1")
    assert done.returncode == 0 and "16 floats written" in done.stdout, done.stderr
    done = run(program, tmp_path / "build", "1,3,17,16", tmp_path / "input.f32", tmp_path / "output.f32", "1")
    assert done.returncode == 2 and "holds no model.so for 1x3x17x16; its profiles are 1x3x17x15" in done.stderr


def test_a_short_file_and_another_library_are_refused_by_name(program: Path, library, tmp_path: Path):
    path, _ = library
    np.zeros(3, np.float32).tofile(tmp_path / "short.f32")
    done = run(program, path, "1,3,17,15", tmp_path / "short.f32", tmp_path / "output.f32")
    assert done.returncode == 2 and "short.f32: cannot be read, or holds fewer than 765 floats" in done.stderr
    (image,) = inputs_of(library[1])
    image.tofile(tmp_path / "input.f32")
    done = run(program, path, "1,3,17,15", tmp_path / "input.f32", tmp_path / "none" / "output.f32")
    assert done.returncode == 2 and "output.f32: cannot be written" in done.stderr and "written to" not in done.stdout
    for shape in ("abc", "-1,3,17,15", "1,,3"):
        done = run(program, path, shape, tmp_path / "input.f32", tmp_path / "output.f32")
        assert done.returncode == 2 and "give positive sizes" in done.stderr
    assert run(program, "missing.so", "1", tmp_path / "short.f32", tmp_path / "output.f32").returncode == 2
    assert run(program).returncode == 2
