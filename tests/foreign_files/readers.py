"""The readers of files (and texts of options) that come from others, each with small valid seeds and the road behind
it as far as a damaged file can get.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.foreign_files.mutations import (
    json_text,
    mutated_arrays,
    mutated_bytes,
    mutated_lines,
    mutated_message,
    mutated_tree,
    yaml_text,
)
from tests.foreign_files.seeds import (
    BUILD_MANIFEST,
    CLUSTERS,
    EXECUTION_TRACES,
    HF_CONFIGS,
    KINETO_TRACES,
    MEASURED_TABLE,
    NCCL_JSON,
    NCCL_LOGS,
    OPTION_TEXTS,
    OVERHEADS,
    PLAN,
    PROFILE_INDEX,
    SWEEP_RESULTS,
    TABLES,
    collective_calibrations,
    kernel_calibrations,
    machine_documents,
    onnx_models,
    record_folders,
    source_lists,
)

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Seed:
    """A valid input: its file's name (a folder's is without a dot), content, and how that is damaged and written."""

    name: str
    content: Any
    write: Callable[[Any, random.Random | None, Path], None]


@dataclass(frozen=True)
class Reader:
    """A reader of files: ``make`` gives its seeds, ``read`` takes a file or folder as far as a command would."""

    name: str
    make: Callable[[Path], list[Seed]]
    read: Callable[[Path], object]
    needs: tuple[str, ...] = ()  # modules that the road imports and that take long
    names_file: bool = True  # whether a refusal names the file

    def seeds(self, folder: Path) -> list[Seed]:
        """The valid inputs."""
        return self.make(folder)

    def case(self, folder: Path, seeds: list[Seed], number: int, rng: random.Random | None) -> Path:
        """The file of seed ``number``, damaged where ``rng`` is given."""
        seed = seeds[number % len(seeds)]
        place = folder / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        # Some readers remember a file by its name and time of change.
        path = place / f"{next(_NUMBERS)}-{seed.name}" if "." in seed.name else place / seed.name
        seed.write(seed.content, rng, path)
        return path


def _json(content: Any, rng: random.Random | None, path: Path) -> None:
    if rng is None:
        path.write_text(json.dumps(content))
        return
    text = json_text(mutated_tree(content, rng), rng)
    path.write_bytes(mutated_bytes(text, rng) if rng.random() < 0.15 else text)


def _yaml(content: Any, rng: random.Random | None, path: Path) -> None:
    import yaml

    if rng is None:
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return
    text = yaml_text(mutated_tree(content, rng), rng)
    path.write_bytes(mutated_bytes(text, rng) if rng.random() < 0.15 else text)


def _lines(content: str, rng: random.Random | None, path: Path) -> None:
    path.write_bytes(content.encode() if rng is None else mutated_lines(content, rng))


def _arrays(content: dict[str, np.ndarray], rng: random.Random | None, path: Path) -> None:
    if rng is None:
        np.savez(path, **content)
    else:
        path.write_bytes(mutated_arrays(content, rng))


def _message(content: Any, rng: random.Random | None, path: Path) -> None:
    data = (content if rng is None else mutated_message(content, rng)).SerializeToString()
    path.write_bytes(mutated_bytes(data, rng) if rng is not None and rng.random() < 0.2 else data)


def _folder(content: dict[str, list[Any] | dict[str, Any] | bytes], rng: random.Random | None, path: Path) -> None:
    """Files of a folder: bytes as they are, a mapping as JSON, a list as lines of JSON; one of these is damaged."""
    path.mkdir()
    chosen = rng.choice([name for name, each in content.items() if not isinstance(each, bytes)]) if rng else None
    for name, each in content.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(each, bytes):
            file.write_bytes(each)
        elif isinstance(each, dict):
            _json(each, rng if name == chosen else None, file)
        else:
            lines = [json.dumps(line).encode() for line in each]
            if name == chosen and rng is not None:
                place = rng.randrange(len(lines))
                lines[place] = json_text(mutated_tree(each[place], rng), rng).replace(b"\n", b" ")
            text = b"".join(line + b"\n" for line in lines)
            damaged = name == chosen and rng is not None and rng.random() < 0.2
            file.write_bytes(mutated_bytes(text, rng) if damaged else text)  # type: ignore[arg-type]


def _of(write: Callable[..., None], name: str, *contents: Any) -> list[Seed]:
    return [Seed(name, content, write) for content in contents]


# --- roads ----------------------------------------------------------------------------------------


def _trace(path: Path) -> object:
    from e2e import predict

    return predict(traces=[path], gpu="v100-sxm2-16gb").to_json()


def _kineto(path: Path) -> object:
    from e2e import predict

    return predict(kineto=[path]).to_json()


def _machine(path: Path) -> object:
    from costmodel.gpu.factory import gpu_cost_model
    from costmodel.machines.machine_file import load_machine
    from costmodel.operators.device_work import Elementwise, Gemm

    machine = load_machine(path)
    if machine.kind == "cpu":
        return machine
    return gpu_cost_model(machine).estimate([Gemm(1, 64, 64, 64), Elementwise("add", 4096, 2)])


def _cluster(path: Path) -> object:
    from costmodel.collectives import collective_cost_model
    from costmodel.machines.cluster import load_cluster
    from costmodel.operators.collective_transfer import CollectiveTransfer

    network = "network" in path.name
    cluster = load_cluster("dgx-h100", 16, network=f"{path}:4") if network else load_cluster(path, 2)
    return collective_cost_model(cluster).estimate([CollectiveTransfer("all_reduce", 2**20, cluster.gpus)])


def _tables(path: Path) -> object:
    from e2e.commands.shard_command import ShardingRequest

    return ShardingRequest(path, "a100-sxm-80gb", 8, 4096).task()


def _sources(path: Path) -> object:
    from lab.data.manifest import read_sources, standing

    return [standing(each, path.parent).record() for each in read_sources(path)]


def _records(path: Path) -> object:
    from schedules.contract.cpu_target import target_with
    from schedules.tuning.tuning_records import RecordStore, recorded_cpus

    found = recorded_cpus(path)
    with RecordStore(path, found[0] if found else target_with((), 1, 32768, 1 << 20)) as store:
        for operator in store.operators():
            store.near_best(operator, 1.5, 4)
            store.add_failure(operator, {"tile": 1}, "crash", "told by the fuzzer")
    return len(store.operators())


def _build(path: Path) -> object:
    from fusion.model.build_folder import check_runnable, describe_inputs, read_profiles

    for artifact in read_profiles(path):
        check_runnable(artifact, tvm_version="0.27.0")
        describe_inputs(artifact.manifest.inputs)
    return True


def _plan(path: Path) -> object:
    from e2e.sharding.plan import load_plan, plan_record

    return plan_record(load_plan(path))


def _nccl_log(path: Path) -> object:
    from costmodel.collectives.own_cluster import fit_logs
    from costmodel.collectives.sweep_logs import Given

    # All seeds name their collectives, and none may be given that is another.
    return fit_logs([path], "dgx-h100", Given(None, 4, 2), path.parent / "out", lambda line: None)


def _configuration(path: Path) -> object:
    from e2e.capture.models.catalog import build_from_file
    from e2e.capture.session import capture
    from e2e.step.options import StepOptions

    return len(capture(build_from_file(path, 1, 4, StepOptions(mode="inference"))).calls)


def _overheads(path: Path) -> object:
    from e2e.price.host_overheads import load_table

    return load_table(path)


def _statistics(path: Path) -> object:
    from costmodel.gpu.embedding_tables import load_statistics

    return load_statistics(path)


def _samples(path: Path) -> object:
    from fusion.model.named_arrays import DeclaredInput, TensorInfo, check_arrays, read_calibration, read_npz

    data = read_calibration(path, [DeclaredInput("x", (None, 3), "float32"), DeclaredInput("n", (1,), "int64")])
    data.call(0)
    return check_arrays(read_npz(path), [TensorInfo("x", (4, 3), "float32"), TensorInfo("n", (4,), "int64")], "run")


def _sweep(path: Path) -> object:
    from e2e.sweeps.sweep_results import ResultFile, SweepRow

    ResultFile(path).add("new", SweepRow("t4", 1, 1, "dp=1", "ok"))
    return True


def _calibration(path: Path) -> object:
    from costmodel.collectives.calibration import read_calibration

    return read_calibration(path)


def _kernels(path: Path) -> object:
    from costmodel.gpu.factory import gpu_cost_model
    from costmodel.gpu.fitted import forget_fitted
    from costmodel.machines.machine_file import load_machine
    from costmodel.operators.device_work import Softmax

    forget_fitted()
    return gpu_cost_model(load_machine("t4"), path).estimate([Softmax(64, 128)])


def _measured(path: Path) -> object:
    from lab.data.kernel_table import read_own_table

    return list(read_own_table(path, "t4"))


def _onnx(path: Path) -> object:
    from fusion.relax.onnx.importer import import_onnx

    return import_onnx(path).inputs


def _analyze(path: Path) -> object:
    from fusion import analyze

    return analyze(path, machine="xeon-amx-2c", threads=1).to_json()


def _predict(path: Path) -> object:
    from e2e import predict

    return predict(model_config=path, gpu="t4", batch_size=1, sequence_length=4).to_json()


def _options(path: Path) -> object:
    from costmodel.machines.machine_file import load_machine
    from e2e.parallelism.spec import parse_parallel
    from e2e.sources.requests import parse_ranks
    from e2e.step.options import parse_routing
    from e2e.sweeps.sweep_space import parse_counts, parse_names
    from fusion.commands.cli import parse_shapes
    from schedules.contract.cpu_target import parse_target

    option, _, text = path.read_bytes().decode("utf-8", "surrogateescape").partition("\n")
    parsers: dict[str, Callable[[str], object]] = {
        "parallel": lambda text: parse_parallel(text, 8),
        "routing": parse_routing,
        "ranks": parse_ranks,
        "counts": lambda text: parse_counts(text, "--gpus"),
        "names": lambda text: parse_names(text, "--gpu"),
        "shape": lambda text: parse_shapes([text]),
        "target": lambda text: parse_target(text, None, load_machine("xeon-amx-2c"), ()),
    }
    return parsers.get(option, parse_parallel)(text.rstrip("\n"))


_CAPTURING = ("torch", "e2e.sources.predict_request")
_MODELS = (*_CAPTURING, "transformers.models.auto.modeling_auto")
_NETWORKS = ("tvm", "onnx", "fusion.relax.onnx.importer")


def _readers() -> list[Reader]:
    return [
        Reader("execution-trace", lambda folder: _of(_json, "et.json", *EXECUTION_TRACES), _trace, _CAPTURING),
        Reader("kineto", lambda folder: _of(_json, "kineto.json", *KINETO_TRACES), _kineto, _CAPTURING),
        Reader("machine", lambda folder: _of(_yaml, "machine.yaml", *machine_documents()), _machine),
        Reader(
            "cluster",
            lambda folder: [
                *_of(_yaml, "cluster.yaml", *CLUSTERS[:2]),
                *_of(_yaml, "network.yaml", *CLUSTERS[2:]),
            ],
            _cluster,
        ),
        Reader("tables", lambda folder: _of(_yaml, "tables.yaml", *TABLES), _tables),
        Reader("sources", lambda folder: _of(_yaml, "sources.yaml", *source_lists()), _sources),
        Reader("records", lambda folder: _of(_folder, "records", *record_folders()), _records, ("tvm",)),
        Reader("build", lambda folder: _of(_folder, "build", BUILD_MANIFEST, PROFILE_INDEX), _build, ("ml_dtypes",)),
        Reader("plan", lambda folder: _of(_json, "plan.json", PLAN), _plan),
        Reader(
            "nccl-log",
            lambda folder: [*_of(_lines, "log.txt", *NCCL_LOGS), *_of(_json, "log.json", *NCCL_JSON)],
            _nccl_log,
        ),
        Reader("configuration", lambda folder: _of(_json, "config.json", *HF_CONFIGS), _configuration, _MODELS),
        Reader("overheads", lambda folder: _of(_json, "overheads.json", OVERHEADS), _overheads),
        Reader("statistics", _statistics_seeds, _statistics),
        Reader("samples", _sample_seeds, _samples),
        Reader("sweep", lambda folder: _of(_folder, "sweep", SWEEP_RESULTS), _sweep),
        Reader("calibration", lambda folder: _of(_json, "fitted.json", *collective_calibrations()), _calibration),
        Reader("kernels", lambda folder: _of(_folder, "kernels", *kernel_calibrations()), _kernels),
        Reader("measured", lambda folder: _of(_lines, "measured.csv", MEASURED_TABLE), _measured),
        Reader("onnx", lambda folder: _of(_message, "model.onnx", *onnx_models()), _onnx, _NETWORKS),
        Reader("analyze", lambda folder: _of(_message, "model.onnx", *onnx_models()), _analyze, _NETWORKS),
        Reader("predict", lambda folder: _of(_json, "config.json", *HF_CONFIGS), _predict, _MODELS),
        Reader("options", lambda folder: _of(_lines, "option.txt", *OPTION_TEXTS), _options, ("tvm",), False),
    ]


def _statistics_seeds(folder: Path) -> list[Seed]:
    batches = {"user.indices": np.arange(20) % 7, "user.offsets": np.arange(0, 20, 2), "user.rows": np.array(9)}
    return _of(_arrays, "batches.npz", batches)


def _sample_seeds(folder: Path) -> list[Seed]:
    return _of(_arrays, "samples.npz", {"x": np.ones((4, 3), np.float32), "n": np.arange(4)})


READERS = {reader.name: reader for reader in _readers()}


def require(name: str) -> None:
    """Skip the running test where a module that the reader ``name`` needs is not installed."""
    for module in READERS[name].needs:
        pytest.importorskip(module)


MOST_SECONDS = 60  # by the clock, of a machine that others use; what waits for a pipe waits for ever


@contextmanager
def in_time(what: str) -> Iterator[None]:
    """Fail what takes longer than ``MOST_SECONDS``."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"{what}: not refused within {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
