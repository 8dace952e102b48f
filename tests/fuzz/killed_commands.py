"""Commands that take long for people, made small: what ``python -m tests.fuzz.kills`` ends in the middle.

Each says what of a folder is finished work, what its progress has told of it, and which reader would believe it.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MACHINE = "xeon-amx-2c"  # kernels are ranked by it; measured they are on the CPU at hand
SIZES = 1  # of layers in the tuned model, which decide how many kernels there are, and how long a life is


@dataclass(frozen=True)
class KilledCommand:
    """``words``: the command line that works in a folder, again and again; ``prepare`` makes its inputs there.

    ``kept``: finished pieces by name, with what they are; a later life must leave both as they are. ``work``: what was
    done, an entry for each time. ``told``: so many pieces of its own its messages have claimed. ``read``: raises
    where a reader of the project fails on what is in the folder. ``result``: what a life that was not killed leaves,
    as it must be after any kills (``None``: times, which differ). ``over``: a next life would begin anew.
    """

    name: str
    words: Callable[[Path], list[str]]
    prepare: Callable[[Path], None]
    kept: Callable[[Path], Mapping[str, Any]]
    work: Callable[[Path], list[str]]
    told: Callable[[str], int]
    read: Callable[[Path], object]
    result: Callable[[Path], object]
    needs: tuple[str, ...] = ()
    over: Callable[[Path], bool] = lambda place: False


def _lines(path: Path) -> list[str]:
    """Whole lines of a file that lines are added to."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def _numbered(folder: Path, *names: str) -> dict[str, Any]:
    return {f"{name}:{number}": line for name in names for number, line in enumerate(_lines(folder / name), 1)}


def _none(place: Path) -> None:
    return None


def _untold(text: str) -> int:
    return 0


# --- fusion ---------------------------------------------------------------------------------------

RECORDS = ("database_tuning_record.json", "failures.jsonl")


def _write_model(place: Path) -> None:
    """Layers of ``SIZES`` sizes: 1x1, depthwise 3x3 and 1x1, which are sites too."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    nodes, value = [], "x"
    for level, channels in enumerate([8 * 2**power for power in range(SIZES)]):
        made = {"wide": (4 * channels, channels, 1, 1), "deep": (4 * channels, 1, 3, 3)}
        made["narrow"] = (2 * channels, 4 * channels, 1, 1)
        for name, shape in made.items():
            weights[f"{name}{level}"] = rng.normal(size=shape, scale=0.2).astype(np.float32)
            group = shape[0] if name == "deep" else 1
            pads, strides = ([1] * 4, [2, 2]) if name == "deep" else ([0] * 4, [1, 1])
            out = f"{name}{level}.out"
            nodes.append(
                helper.make_node("Conv", [value, f"{name}{level}"], [out], group=group, pads=pads, strides=strides)
            )
            if name != "narrow":
                nodes.append(helper.make_node("Relu", [out], [f"{out}.relu"]))
                out = f"{out}.relu"
            value = out
    nodes.append(helper.make_node("GlobalAveragePool", [value], ["y"]))
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 32, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8 * 2**SIZES, 1, 1])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), place / "small.onnx")


def _tune_words(place: Path) -> list[str]:
    options = ["--trials", "4", "--threads", "1", "--machine", MACHINE, "--no-report"]
    return ["-m", "fusion", "tune", str(place / "small.onnx"), "-o", str(place / "out"), *options]


def _measured(folder: Path) -> list[str]:
    """Operator and configuration of every trial; what was compared once more at the end is none."""
    from schedules.records.tuning_records import parse_line

    found = []
    for line in _lines(folder / RECORDS[0]):
        parsed = parse_line(line)
        assert parsed is not None, line
        record = parsed[0]
        if not record.confirmed:
            found.append(f"{record.operator} {sorted(record.config.items())}")
    for failure in map(json.loads, _lines(folder / RECORDS[1])):
        found.append(f"{failure['operator']} {sorted(failure['config'].items())}")
    return found


def _read_records(folder: Path) -> None:
    from schedules.contract.cpu_target import host_target
    from schedules.records.record_store import RecordStore

    store = RecordStore(folder, host_target(1))
    for operator in store.operators():
        store.best(operator)


def _read_build(place: Path) -> None:
    """A whole build, or one that is refused."""
    from costmodel.base.errors import InputError
    from fusion.artifact.profile_folders import read_profiles

    _read_records(place / "out" / "records")
    for name in ("summary.json", "manifest.json"):
        if (place / "out" / name).is_file():
            json.loads((place / "out" / name).read_text())
    try:
        read_profiles(place / "out")
    except InputError as error:
        # Nothing is there yet; or it ended between two renames, and the manifest does not fit.
        assert "missing" in str(error) or "no such build" in str(error) or "damaged, its digest" in str(error), error


def _built(place: Path) -> object:
    from fusion.artifact.profile_folders import read_profiles

    return [sorted(each.manifest.files) for each in read_profiles(place / "out")]


def _records_words(place: Path) -> list[str]:
    options = ["--configurations", "4", "--threads", "1"]
    return ["-m", "fusion", "records", "measure", str(place / "small.onnx"), "-o", str(place / "out"), *options]


def _largest(pattern: str, text: str) -> int:
    return max((int(each) for each in re.findall(pattern, text, re.MULTILINE)), default=0)


# --- e2e ------------------------------------------------------------------------------------------

CONFIGURATION = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}


def _write_configuration(place: Path) -> None:
    (place / "config.json").write_text(json.dumps(CONFIGURATION))


def _sweep_words(place: Path) -> list[str]:
    options = ["--gpu", "h100-sxm", "--gpus", "2", "--sequence-length", "64", "--workers", "2", "--json"]
    return ["-m", "e2e", "sweep", "--model", str(place / "config.json"), "-o", str(place / "out"), *options]


def _sweep_alone_words(place: Path) -> list[str]:
    """In one process, without workers."""
    return [*_sweep_words(place), "--workers", "1"]


def _swept(place: Path) -> list[str]:
    return [json.loads(line)["key"] for line in _lines(place / "out" / "results.jsonl")]


def _read_sweep(place: Path) -> None:
    from e2e.sweeps.sweep_results import ResultFile

    if (place / "out").is_dir():
        # Its reader cuts a line that was not finished: on a copy, as the next life shall meet it.
        copy = place / "copy"
        copy.mkdir(exist_ok=True)
        text = (place / "out" / "results.jsonl").read_bytes() if (place / "out" / "results.jsonl").is_file() else b""
        (copy / "results.jsonl").write_bytes(text)
        ResultFile(copy)


def _sweep_result(place: Path) -> object:
    """Without the keys, in which the name of the configuration's file is."""
    rows = [json.loads(line) for line in _lines(place / "out" / "results.jsonl")]
    return sorted(json.dumps({name: value for name, value in row.items() if name != "key"}) for row in rows)


# --- costmodel ------------------------------------------------------------------------------------

GPUS = {"Tesla T4": "t4", "Tesla P4": "p4", "Tesla V100-PCIE-32GB": "v100-pcie-32gb"}


def _write_tables(place: Path) -> None:
    """Of ReLU on three GPUs, and of products on one more: invented."""
    import pyarrow
    import pyarrow.parquet

    from costmodel.machines.machine_catalog import load_machine

    for label, name in GPUS.items():
        bandwidth = load_machine(name).memory[-1].bandwidth.at(1)
        path = place / "data" / "neusight" / "op_latency" / "relu" / f"{label}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = ["Latency,B,H", *["0.02,1,1"] * 10]
        rows += [f"{1e3 * 9.6 * size / bandwidth + 0.01},1,{size}" for size in np.geomspace(1e7, 1e9, 400).astype(int)]
        path.write_bytes(gzip.compress("\n".join(rows).encode(), mtime=0))
    path = place / "data" / "aiconfigurator" / "l40s" / "gemm" / "gemm_perf.parquet"
    path.parent.mkdir(parents=True)
    sizes = [64 * each for each in range(1, 81)]
    columns = {"gemm_dtype": ["bfloat16"] * 80, "m": sizes, "n": sizes, "k": sizes, "latency": [0.1] * 80}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _fit_words(place: Path) -> list[str]:
    return [
        "-m",
        "lab.fit",
        "kernels",
        "--all",
        "--data",
        str(place / "data"),
        "-o",
        str(place / "out"),
    ]


def _fitted_files(place: Path) -> Iterator[tuple[str, Path]]:
    """Those that are finished, by name: in their place, or where they wait for the others."""
    for path in sorted((place / "out").rglob("*.json")):
        inside = path.relative_to(place / "out").parts
        yield "/".join(inside[1:] if inside[0].startswith(".unfinished-") else inside), path


def _fit_pieces(place: Path) -> dict[str, Any]:
    """By the time they were written: nothing is written twice, moving changes no time. Trees alone go in the end."""
    return {name: path.stat().st_mtime_ns for name, path in _fitted_files(place) if not name.startswith("grown/")}


def _read_fitted(place: Path) -> None:
    from costmodel.gpu.residuals.fitted import all_fitted, forget_fitted, transfer

    forget_fitted()
    for folder in {path.parent for _, path in _fitted_files(place)} | {place / "out"}:
        all_fitted(folder)
        transfer(folder)


def _fit_result(place: Path) -> object:
    return {name: path.read_bytes() for name, path in _fitted_files(place)}


def _measure_words(place: Path) -> list[str]:
    options = ["--suite", "embedding", "--device", "cpu", "--minutes", "0.05", "--resume"]  # its rows take 10 ms
    return ["-m", "costmodel", "measure", *options, "-o", str(place / "out")]


def _operators(place: Path) -> list[str]:
    text = "\n".join(_lines(place / "out" / "embedding.csv"))
    return [row["operator"] for row in csv.DictReader(io.StringIO(text))]


def _read_table(place: Path) -> None:
    path = place / "out" / "embedding.csv"
    if path.is_file():
        rows = list(csv.DictReader(io.StringIO("\n".join(_lines(path)))))
        assert all(None not in row and None not in row.values() for row in rows), "a row of another length"
        json.loads((place / "out" / "embedding.json").read_text())


COMMANDS = {
    each.name: each
    for each in (
        KilledCommand(
            "tune", _tune_words, _write_model,
            lambda place: _numbered(place / "out" / "records", *RECORDS),
            lambda place: _measured(place / "out" / "records"),
            lambda text: _largest(r"trial (\d+)/\d+", text), _read_build, _built, ("tvm", "onnx", "onnxruntime"),
        ),
        KilledCommand(
            "records", _records_words, _write_model,
            lambda place: _numbered(place / "out" / "small" / "records", *RECORDS),
            lambda place: _measured(place / "out" / "small" / "records"),
            _untold, lambda place: _read_records(place / "out" / "small" / "records"),
            lambda place: len(_measured(place / "out" / "small" / "records")), ("tvm", "onnx"),
        ),
        KilledCommand(
            "sweep", _sweep_words, _write_configuration,
            lambda place: _numbered(place / "out", "results.jsonl"),
            _swept, lambda text: len(re.findall(r"^\d+ of \d+: ", text, re.MULTILINE)),
            _read_sweep, _sweep_result, ("torch", "transformers"),
        ),
        KilledCommand(
            "sweep-alone", _sweep_alone_words, _write_configuration,
            lambda place: _numbered(place / "out", "results.jsonl"),
            _swept, lambda text: len(re.findall(r"^\d+ of \d+: ", text, re.MULTILINE)),
            _read_sweep, _sweep_result, ("torch", "transformers"),
        ),
        KilledCommand(
            "fit", _fit_words, _write_tables, _fit_pieces, lambda place: [], _untold, _read_fitted, _fit_result,
            ("xgboost", "pyarrow"), lambda place: (place / "out" / "transfer.json").is_file(),
        ),
        KilledCommand(
            "measure", _measure_words, _none,
            lambda place: _numbered(place / "out", "embedding.csv"),
            _operators, lambda text: _largest(r"^(\d+) (?:done|lookups measured)", text),
            _read_table, _none, ("torch",),
        ),
    )
}  # fmt: skip
