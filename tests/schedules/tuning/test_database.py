"""Tuning records: a real MetaSchedule database, whatever happens to the process or the disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError, OutputError
from costmodel.operators.layers import Conv2d, Dense, Epilogue, FusedConvs, Operator, Pool2d, Prologue
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_reference import reference
from schedules.measuring.kernel_verification import random_parameters
from schedules.tuning import tuning_records as database
from schedules.tuning.tuning_records import FAILURES, RECORDS, WORKLOADS, Record, RecordStore, read_config

CPU = CpuTarget(16, 32, "skylake-avx512", ("avx2", "avx512f"), 2, 32 * 1024, 1024 * 1024)
DENSE = Dense(3, 17, 5, Epilogue(bias=True, activation="relu"))
PAIR = FusedConvs(
    (
        Conv2d(1, 8, 7, 7, 8, (3, 3), (2, 2), (1, 1, 1, 1), groups=8, epilogue=Epilogue(True, "relu6")),
        Conv2d(1, 8, 4, 4, 5, (1, 1), epilogue=Epilogue(bias=True, residual="before_activation")),
    )
)
A, B, C = ({"tile": tile, "unroll": 2} for tile in (1, 2, 3))


def test_records_survive_the_process(tmp_path: Path):
    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 2e-3)
        store.add(PAIR, B, 5e-4)
        store.add(DENSE, C, 1e-3)
        store.add_failure(DENSE, B, "crash", "SIGSEGV\nwhile running")
    store = RecordStore(tmp_path, CPU)
    assert store.best(DENSE) == Record(DENSE, C, 1e-3)
    assert store.all(DENSE) == [Record(DENSE, A, 2e-3), Record(DENSE, C, 1e-3)]
    assert store.best(PAIR) == Record(PAIR, B, 5e-4)
    assert [(f.config, f.error, f.message) for f in store.failures(DENSE)] == [(B, "crash", "SIGSEGV\nwhile running")]
    assert store.operators() == [DENSE, PAIR]
    assert store.best(Dense(1, 2, 3)) is None and store.all(Dense(1, 2, 3)) == []


def test_tvm_reads_the_files_and_replays_the_decision(tmp_path: Path):
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    from schedules.contract.operator_workload import workload

    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 2e-3)
        store.add(PAIR, B, 5e-4)
        store.add(PAIR, A, 4e-4)
    tvm_database = JSONDatabase(work_dir=str(tmp_path))
    assert len(tvm_database) == 3
    best = tvm_database.query_tuning_record(workload(PAIR), CPU.tvm_target(), "main")
    assert [float(seconds) for seconds in best.run_secs] == [4e-4]
    replayed = tvm_database.query_ir_module(workload(PAIR), CPU.tvm_target(), "main")
    assert read_config(replayed["main"]) == (PAIR, A)
    assert read_config(workload(PAIR)["main"]) is None
    assert len((tmp_path / WORKLOADS).read_text().splitlines()) == 2


def test_records_of_other_cpus_and_versions_are_ignored_but_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    four_threads = dataclasses.replace(CPU, threads=4)
    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 1e-3)
        store.add_failure(DENSE, C, "hang", "")
    with RecordStore(tmp_path, four_threads) as store:
        assert store.all(DENSE) == [] and store.failures(DENSE) == []
        store.add(DENSE, B, 5e-4)
    assert RecordStore(tmp_path, CPU).all(DENSE) == [Record(DENSE, A, 1e-3)]
    assert RecordStore(tmp_path, four_threads).best(DENSE) == Record(DENSE, B, 5e-4)
    monkeypatch.setattr("schedules.tuning.tuning_records.version", lambda package: "0.99")
    assert RecordStore(tmp_path, CPU).all(DENSE) == []


def test_a_second_measurement_replaces_the_first(tmp_path: Path):
    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 2e-3)
        store.add(DENSE, A, 3e-3)
        assert store.all(DENSE) == [Record(DENSE, A, 3e-3)]


def test_a_comparison_outranks_what_was_measured_before_it(tmp_path: Path):
    """A lucky 1.0 ms loses against 1.2 ms in the comparison; a later 1.1 ms wins again."""
    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 1.0e-3)
        store.add(DENSE, B, 1.1e-3)
        store.confirm(DENSE, [(B, 1.2e-3), (A, 1.3e-3)])
    with RecordStore(tmp_path, CPU) as store:
        assert store.best(DENSE) == Record(DENSE, B, 1.2e-3, confirmed=True)
        store.add(DENSE, C, 1.15e-3)
        assert store.best(DENSE) == Record(DENSE, C, 1.15e-3)


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_that_a_killed_process_left_unfinished(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture):
    """With the line break missing the record is whole, with 40 bytes missing it is lost; the file goes on."""
    from tvm.s_tir.meta_schedule.database import JSONDatabase

    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 2e-3)
        store.add(DENSE, B, 1e-3)
    path = tmp_path / RECORDS
    os.truncate(path, path.stat().st_size - cut)
    with caplog.at_level(logging.WARNING), RecordStore(tmp_path, CPU) as store:
        assert len(store.all(DENSE)) == (2 if cut == 1 else 1)
        assert ("unfinished" in caplog.text) == (cut == 40)
        store.add(DENSE, C, 3e-3)
    assert [record.config for record in RecordStore(tmp_path, CPU).all(DENSE)][-1] == C
    assert len(JSONDatabase(work_dir=str(tmp_path))) == (3 if cut == 1 else 2)


def test_a_workload_that_a_killed_process_left_unfinished(tmp_path: Path):
    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 2e-3)
    path = tmp_path / WORKLOADS
    path.write_text(path.read_text() + '["12')
    with RecordStore(tmp_path, CPU) as store:
        store.add(PAIR, A, 1e-3)
        assert len(store.database()) == 2


@pytest.mark.parametrize("name", [RECORDS, FAILURES])
def test_a_corrupt_file_is_named_with_its_line(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"\xff\x00 not json\n{}\n")
    with pytest.raises(InputError, match=rf"{name}: line 1 "):
        RecordStore(tmp_path, CPU)


def test_records_of_stock_meta_schedule_in_the_same_file_are_ignored(tmp_path: Path):
    line = [0, [[[["GetSBlock", [], ["B", "main"], ["b0"]], ["Annotate", ["b0", 1], ["x"], []]], []], [1e-3], {}, []]]
    (tmp_path / RECORDS).write_text(json.dumps(line) + "\n")
    assert RecordStore(tmp_path, CPU).operators() == []


def test_a_file_where_the_directory_should_be(tmp_path: Path):
    path = tmp_path / "records"
    path.write_text("")
    with pytest.raises(InputError, match="records: "):
        RecordStore(path, CPU)


def test_reading_makes_nothing_and_needs_no_tvm(tmp_path: Path):
    code = (
        "import sys; from schedules.tuning.tuning_records import RecordStore\n"
        "from schedules.contract.cpu_target import host_target\n"
        f"RecordStore({str(tmp_path / 'new')!r}, host_target()); sys.exit('tvm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(database.__file__).parents[2]).returncode == 0
    assert not (tmp_path / "new").exists()


def test_a_directory_that_cannot_be_made():
    store = RecordStore("/proc/no-such-directory/records", CPU)
    with pytest.raises(OutputError, match="cannot be written"):
        store.add(DENSE, A, 1e-3)


def test_only_one_process_writes(tmp_path: Path):
    with RecordStore(tmp_path, CPU) as first:
        first.add(DENSE, A, 1e-3)
        second = RecordStore(tmp_path, CPU)
        assert second.best(DENSE) is not None
        with pytest.raises(OutputError, match="another process"):
            second.add(DENSE, B, 1e-3)
    second.add(DENSE, B, 1e-3)
    second.close()


def test_who_claims_a_store_keeps_others_out_and_knows_what_they_wrote(tmp_path: Path):
    early, late = RecordStore(tmp_path, CPU), RecordStore(tmp_path, CPU)
    early.claim()
    with pytest.raises(OutputError, match="another process"):
        late.claim()
    early.add(DENSE, A, 1e-3)
    early.add_failure(DENSE, B, "crash", "")
    early.close()
    assert late.best(DENSE) is None
    with late:
        late.claim()
        assert late.best(DENSE) == Record(DENSE, A, 1e-3) and [each.config for each in late.failures(DENSE)] == [B]
        late.add(DENSE, C, 5e-4)  # and the workload is where the first one wrote it
        assert len(late.database()) == 2


def test_a_claim_without_a_record_leaves_no_folder(tmp_path: Path):
    with RecordStore(tmp_path / "records", CPU) as store:
        store.claim()
    assert not (tmp_path / "records").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_whole_lines(tmp_path: Path):
    """The file size limit of the process stands for the end of the disk."""
    with RecordStore(tmp_path, CPU) as store:
        store.add(DENSE, A, 1e-3)
    size = (tmp_path / RECORDS).stat().st_size
    limit = max(size, (tmp_path / WORKLOADS).stat().st_size) + 100
    code = f"""
import resource, signal, sys
from costmodel.base.errors import OutputError
from schedules.tuning.tuning_records import RecordStore
from tests_database import CPU, DENSE, B
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = RecordStore({str(tmp_path)!r}, CPU)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    for tile in range(100):
        store.add(DENSE, dict(B, tile=tile), 1e-3)
except OutputError as error:
    sys.exit(0 if "cannot be written" in str(error) else 2)
sys.exit(3)
"""
    helper = tmp_path / "helper"
    helper.mkdir()
    (helper / "tests_database.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join((str(helper), str(Path(database.__file__).parents[2])))
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=False)
    assert run.returncode == 0
    assert (tmp_path / RECORDS).read_text().endswith("\n")
    assert A in [record.config for record in RecordStore(tmp_path, CPU).all(DENSE)]


# --- the workloads ---

OPERATORS: list[Operator] = [
    DENSE,
    PAIR,
    Dense(2, 9, 4, Epilogue(activation="sigmoid", residual="after_activation")),
    Conv2d(
        2,
        6,
        9,
        7,
        4,
        (3, 3),
        (2, 2),
        (1, 0, 1, 2),
        groups=2,
        epilogue=Epilogue(True, "hard_swish", "before_activation"),
    ),  # fmt: skip
    Conv2d(
        1,
        8,
        7,
        7,
        8,
        (3, 3),
        padding=(2, 2, 2, 2),
        dilation=(2, 2),
        groups=8,
        epilogue=Epilogue(activation="silu", residual="after_activation"),
    ),  # fmt: skip
    Conv2d(
        1, 8, 7, 9, 8, (3, 3), padding=(1, 1, 1, 1), prologue=Prologue(True, "relu"), epilogue=Epilogue(True, "prelu")
    ),
    Conv2d(1, 8, 5, 5, 8, (1, 1), prologue=Prologue(False, "hard_swish", 0.2), epilogue=Epilogue(True, "mish")),
    Conv2d(1, 8, 5, 5, 8, (1, 1), epilogue=Epilogue(True, "elu", affine=True)),
    Conv2d(1, 8, 5, 5, 8, (1, 1), epilogue=Epilogue(activation="tanh")),
    Pool2d("max", 1, 3, 7, 9, (3, 3), (2, 2), (1, 1, 1, 1)),
    Pool2d("average", 1, 3, 7, 9, (3, 3), (2, 2), (1, 1, 1, 1)),
    Pool2d("average", 1, 3, 7, 9, (3, 3), (2, 2), (1, 1, 1, 1), count_include_pad=True),
]


def test_workloads_compute_the_operators():
    """All in one module, so that the compiler starts once."""
    import tvm

    from schedules.contract.operator_workload import workload

    functions = {
        f"operator{index}": workload(operator)["main"].with_attr("global_symbol", f"operator{index}")
        for index, operator in enumerate(OPERATORS)
    }
    library = tvm.compile(tvm.IRModule(functions), target="llvm")
    rng = np.random.default_rng(0)
    for name, operator in zip(functions, OPERATORS, strict=True):
        data = rng.standard_normal(operator.input_shape, dtype=np.float32)
        parameters = random_parameters(operator, rng)
        names = ("input_scale", "input_shift", "weight", "bias", "slopes", "scale", "shift")
        given = (getattr(each, name) for each in parameters for name in names)
        arrays = [data, *(array for array in given if array is not None)]
        residual = None
        if not isinstance(operator, Pool2d) and operator.epilogue.residual:
            residual = rng.standard_normal(operator.output_shape, dtype=np.float32)
            arrays.append(residual)
        tensors = [tvm.runtime.tensor(a) for a in (*arrays, np.zeros(operator.output_shape, np.float32))]
        library[name](*tensors)
        np.testing.assert_allclose(tensors[-1].numpy(), reference(operator, data, parameters, residual), atol=1e-5)
