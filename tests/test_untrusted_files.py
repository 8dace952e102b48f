"""Files that others wrote never decide what code is run."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodel.base.errors import ProjectError
from tests.source_imports import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
# Seals what it writes, and opens only what this user sealed.
OWN_CACHE = "e2e/parallelism/capture_cache.py"
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Where code is loaded that no file was read for: who says which.
LOADERS = {
    "costmodel/commands/doctor.py": {"ctypes.CDLL"},  # of `doctor`: what it has just compiled
    # The job and the answer of the user's program, in a folder of this process alone: the program itself is run.
    "e2e/capture/program.py": {"pickle"},
    "e2e/capture/distributed/communication.py": {"pickle"},  # objects that its ranks send each other
    "e2e/capture/distributed/shared_objects.py": {"pickle"},  # likewise
    "e2e/capture/periods.py": {"eval"},  # a divisor in its own source
    "e2e/capture/program_process.py": {"pickle"},
    "e2e/capture/launcher.py": {"spec.loader.exec_module"},  # torchtune's own table of recipes, installed
    "e2e/capture/script.py": {"spec.loader.exec_module"},  # the program that --script names
    "fusion/model/tuned_model.py": {"tvm.runtime.load_module"},  # a build's own library: a build is code, docs say so
    "fusion/relax/machine_code.py": {"tvm.runtime.load_static_library"},  # compiled by this process
    "schedules/tuning/stock_meta_schedule.py": {"tvm.runtime.load_module"},  # compiled by a child of this process
}
# Modules by names that the program holds in tables of its own.
BY_NAME = {
    "costmodel/base/lazy_names.py",
    "e2e/capture/cuda_packages/finder.py",
    "e2e/capture/distributed/deepspeed_package.py",
    "e2e/capture/environment.py",
    "e2e/capture/models/image_models.py",
    "e2e/sources/requests.py",
    "fusion/comparing/engine.py",
    "fusion/modelzoo.py",
    "schedules/measuring/measure_worker.py",  # told by the process that started it
}
CODE_LOADERS = {"load_module", "load_static_library", "exec_module", "register_custom_ops_library", "load_inline"}
TEXT_RUNNERS = {"os.system", "os.popen", "torch.hub.load", "torch.jit.load", "pd.read_pickle", "pandas.read_pickle"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "UniqueKeyLoader", "_LOADER"}


def dangers(source: str) -> Iterator[str]:
    """What of ``source`` may run code that a file holds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in RUNS_WHAT_IT_READS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_WHAT_IT_READS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if called in ("eval", "exec", "builtins.eval", "builtins.exec"):
        yield called
    elif called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
        yield f"{called} without allow_pickle=False"
    elif called == "torch.load" and given.get("weights_only") != "True":
        yield f"{called} without weights_only=True"
    elif called in ("yaml.load", "yaml.load_all") and given.get("Loader") not in SAFE_LOADERS:
        yield f"{called} without a safe loader"
    elif called in ("yaml.unsafe_load", "yaml.full_load"):
        yield called
    else:
        yield from _of_loader(node, called, given)


def _of_loader(node: ast.Call, called: str, given: dict[str | None, str]) -> Iterator[str]:
    """Libraries, modules and programs by a name that is not written there."""
    name, first = called.rpartition(".")[2], ast.unparse(node.args[0]) if node.args else ""
    written = bool(node.args) and isinstance(node.args[0], ast.Constant)
    library = name in ("CDLL", "PyDLL", "LoadLibrary") and first != "None"  # None: this process itself
    if library or name in CODE_LOADERS:
        yield called
    elif name in ("import_module", "__import__", "run_path", "run_module") and not written:
        yield f"{name} by name"
    elif called in TEXT_RUNNERS or called.endswith((".extract", ".extractall")):
        yield called
    elif given.get("shell", "False") != "False" or given.get("trust_remote_code", "False") != "False":
        yield f"{called} that runs a text"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_that_is_read_is_run(package: str):
    found = {
        name: sorted(here)
        for path in sorted((ROOT / package).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) != OWN_CACHE
        and (here := set(dangers(path.read_text(encoding="utf-8"))) - known(name))
    }
    assert found == {}


def known(name: str) -> set[str]:
    """What the file ``name`` may do."""
    return LOADERS.get(name, set()) | ({"import_module by name"} if name in BY_NAME else set())


# --- planted inputs -------------------------------------------------------------------------------


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.trace),)


def _yaml(trace: Path, path: Path) -> Path:
    path.write_text(f"name: !!python/object/apply:os.mkdir ['{trace}']\nkind: cpu\n")
    return path


def _arrays(trace: Path, path: Path) -> Path:
    np.savez(path, x=np.array([Planted(trace)], dtype=object))
    return path


def _machine(trace: Path, folder: Path) -> None:
    from costmodel.machines.machine_file import load_machine

    load_machine(_yaml(trace, folder / "machine.yaml"))


def _cluster(trace: Path, folder: Path) -> None:
    from costmodel.machines.cluster import load_cluster

    load_cluster(_yaml(trace, folder / "cluster.yaml"), 2)


def _sources(trace: Path, folder: Path) -> None:
    from lab.data.manifest import read_sources

    read_sources(_yaml(trace, folder / "sources.yaml"))


def _tables(trace: Path, folder: Path) -> None:
    from costmodel.gpu.embedding_tables import read_table_file

    read_table_file(_yaml(trace, folder / "tables.yaml"))


def _samples(trace: Path, folder: Path) -> None:
    from fusion.model.named_arrays import read_npz

    read_npz(_arrays(trace, folder / "samples.npz"))


def _statistics(trace: Path, folder: Path) -> None:
    from costmodel.gpu.embedding_tables import load_statistics

    load_statistics(_arrays(trace, folder / "statistics.npz"))


def _library(name: str) -> Callable[[Path, Path], None]:
    def plant(trace: Path, folder: Path) -> None:
        """A manifest that names a library outside of the build, and its true digest."""
        from fusion.model.build_folder import file_digest, read_artifact
        from tests.foreign_files.seeds import BUILD_MANIFEST

        (folder / "build").mkdir()
        for path in (folder / "evil.so", folder / "build" / "model.so"):
            path.write_bytes(b"no library, but who looks")
        manifest = json.loads(json.dumps(BUILD_MANIFEST["manifest.json"]))
        manifest["files"] = dict.fromkeys(("model.so", name.format(folder=folder)), file_digest(folder / "evil.so"))
        (folder / "build" / "manifest.json").write_text(json.dumps(manifest))
        read_artifact(folder / "build")

    return plant


def _configuration(trace: Path, folder: Path) -> None:
    """Classes of one's own, as Hugging Face's hub runs them with trust_remote_code."""
    pytest.importorskip("transformers")
    from e2e.capture.models.catalog import build_from_file
    from e2e.step.options import StepOptions

    (folder / "configuration_evil.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    own = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "configuration_evil.Evil"}
    record = {"model_type": "evil", "auto_map": own, "trust_remote_code": True, "architectures": ["Evil"]}
    (folder / "config.json").write_text(json.dumps(record))
    build_from_file(folder / "config.json", 1, 4, StepOptions())


@pytest.mark.parametrize(
    "plant",
    [
        _machine, _cluster, _sources, _tables, _samples, _statistics, _configuration,
        _library("../evil.so"), _library("{folder}/evil.so"), _library("..")
    ],
)  # fmt: skip
def test_what_is_planted_is_refused_and_does_not_run(plant: Callable[[Path, Path], None], tmp_path: Path):
    trace = tmp_path / "ran"
    with pytest.raises(ProjectError):
        plant(trace, tmp_path)
    assert not trace.exists()
