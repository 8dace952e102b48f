"""Readers of every public form, on small tables made here: columns, units, what is left out, what is refused."""

from __future__ import annotations

import gzip
import io
import json
import tarfile

import pytest

from costmodel.operators.collective_transfer import CollectiveTransfer
from lab.bench.unseen_kernels import FILE, RANKS, SAMPLES, read_dlrm_trace
from lab.data.aiconfigurator import gemm_files
from lab.data.collective_sweeps import read_collectives, sweep_files
from lab.data.profiled_kernels import latency_files
from lab.validate.cost_models import HELD_OUT_RANKS as LEFT_OUT_RANKS
from lab.validate.cost_models import HELD_OUT_SIZES, validate_collectives


def nccl_perf(data, rows, system="h100_sxm", version="2.99"):
    """``rows``: operation, dtype, GPUs, elements, milliseconds."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ("op_name", "nccl_dtype", "num_gpus", "message_size", "latency")
    columns = {name: list(values) for name, values in zip(names, zip(*rows, strict=True), strict=True)}
    path = data / "aiconfigurator" / system / "comm" / "nccl" / version / "nccl_perf.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


def public(data):
    """The rows of the public table alone."""
    return read_collectives(data)[0].rows


def test_elements_milliseconds_and_the_larger_buffer(tmp_path):
    rows = [
        ("all_reduce", "half", 8, 1024, 0.02),
        ("all_gather", "half", 8, 1024, 0.03),
        ("alltoall", "float", 2, 100, 0.04),
        ("all_reduce", "int8", 8, 1024, 0.05),  # switches do not add bytes
        ("reduce_scatter", "int8", 4, 64, 0.06),
    ]
    nccl_perf(tmp_path, rows)
    found = [(row.transfer, row.seconds, row.nccl) for row in public(tmp_path)]
    assert found == [
        (CollectiveTransfer("all_reduce", 2048.0, 8), pytest.approx(2e-5), "2.99"),
        (CollectiveTransfer("all_gather", 256.0, 8), pytest.approx(3e-5), "2.99"),
        (CollectiveTransfer("all_to_all", 400.0, 2), pytest.approx(4e-5), "2.99"),
        (CollectiveTransfer("reduce_scatter", 64.0, 4), pytest.approx(6e-5), "2.99"),
    ]


def vidur(data, name, rows):
    """``rows``: ranks, GPUs per node, bytes, median milliseconds."""
    kind = name.split("/")[1]
    path = data / "vidur" / f"{name}.csv.gz"
    path.parent.mkdir(parents=True)
    lines = [f"num_workers,devices_per_node,size,time_stats.{kind}.median", *(",".join(map(str, row)) for row in rows)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_messages_between_nodes_are_the_median_of_their_repetitions(tmp_path):
    vidur(tmp_path, "h100_dgx/send_recv", [(2, 1, 4096, 0.03), (2, 1, 4096, 0.01), (2, 1, 4096, 0.02), (2, 2, 8, 0.5)])
    found = [(row.transfer, row.seconds) for row in public(tmp_path)]
    assert found == [
        (CollectiveTransfer("send_recv", 4096.0, 2, 2), pytest.approx(2e-5)),
        (CollectiveTransfer("send_recv", 8.0, 2, 1), pytest.approx(5e-4)),
    ]


def test_all_reduces_that_hold_waiting_are_left_out(tmp_path):
    vidur(tmp_path, "a100_pairwise_nvlink/all_reduce", [(4, 4, 1e6, 9.0), (4, 4, 4e6, 0.1)])
    (row,) = public(tmp_path)
    assert row.transfer == CollectiveTransfer("all_reduce", 4e6, 4) and row.seconds == pytest.approx(1e-4)


def test_only_known_files_count_and_only_wanted_ones_are_read(tmp_path):
    path = nccl_perf(tmp_path, [("all_reduce", "half", 2, 64, 0.01)])
    other = nccl_perf(tmp_path, [("all_reduce", "half", 2, 64, 0.01)], system="l40s")
    nccl_perf(tmp_path, [("all_reduce", "half", 2, 64, 0.01)], system="unknown_sxm")
    assert sweep_files(tmp_path) == [path, other] and gemm_files(tmp_path) == latency_files(tmp_path) == []
    tables = read_collectives(tmp_path, lambda each: each == other)
    assert [each.machine for each in tables if "nccl_perf" in each.source] == ["l40s"]
    assert read_collectives(tmp_path, lambda each: False) == []


def test_validation_of_collectives_on_a_made_sweep(tmp_path):
    """Times of a start and a bandwidth are met on sizes and on four ranks left out."""
    rows = [
        ("all_reduce", "half", ranks, 2**power, 1e3 * (8e-6 * (1 + ranks / 8) + 2 * 2**power / 300e9))
        for ranks in (2, 4, 8)
        for power in range(9, 28)
    ]
    nccl_perf(tmp_path, rows)
    results = validate_collectives(tmp_path, (HELD_OUT_SIZES, LEFT_OUT_RANKS))
    own = {(each.split, each.family): each.accuracy for each in results if each.machine == "h100-sxm"}
    assert own[HELD_OUT_SIZES, "all_reduce, from 1 MiB"].mape < 0.05
    assert own[LEFT_OUT_RANKS, "all kinds, from 1 MiB"].count == 9  # 1 MiB to 256 MiB
    assert own[LEFT_OUT_RANKS, "all kinds, from 1 MiB"].mape < 0.15


def kernel(name, start, duration, stream=7):
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": {"stream": stream}}


def dlrm(data, ranks=8):
    """Profiles of the kernels that the reader looks for, of rank r in multiples of r + 1 us."""
    path = data / FILE
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as archive:
        for rank in range(ranks):
            scale = rank + 1
            events = [
                kernel("split_embedding_codegen_forward_x", 0, 2 * scale),
                kernel("linearize_index_of_the_replicated", 5, 9),
                kernel("linearize_index", 10, 3 * scale),
                kernel("cub::DeviceRadixSort", 20, 4 * scale),
                kernel("cub::DeviceRadixSort<at_cuda_detail>", 25, 99),  # PyTorch's own
                kernel("cub::DeviceRadixSort", 26, 99, stream=20),
                kernel("backward_codegen_adagrad_y", 30, 5 * scale),
                {"cat": "cpu_op", "name": "linearize_index", "ts": 0, "dur": 99},
            ]
            content = json.dumps({"traceEvents": events[::-1]}).encode()
            member = tarfile.TarInfo(f"dlrm_kineto/worker{rank}_step_12.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_kernels_of_a_recorded_dlrm_step(tmp_path):
    dlrm(tmp_path)
    ranks = read_dlrm_trace(tmp_path)
    assert [each.rank for each in ranks] == list(range(8))
    third = ranks[2]
    assert (third.forward, third.linearize) == (pytest.approx(6e-6), pytest.approx(9e-6))
    assert (third.sort, third.update) == (pytest.approx(12e-6), pytest.approx(15e-6))
    assert third.backward == pytest.approx(36e-6)
    assert [(each.rows, each.indices) for each in third.tables] == [(r, SAMPLES * p) for r, p in RANKS[2]]
