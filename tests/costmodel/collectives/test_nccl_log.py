from __future__ import annotations

import json

import pytest

from costmodel.base.errors import InputError
from costmodel.collectives import collective_cost_model
from costmodel.collectives.calibration import read_calibration
from costmodel.collectives.sweep_logs import Given, read_log, read_own_table, transfer_kind
from costmodel.commands.cli import main
from costmodel.machines.cluster import load_cluster
from costmodel.operators.collective_transfer import CollectiveTransfer

DEVICES = """\
#  Rank  0 Group  0 Pid 221423 on    gpu-1 device  0 [0009:01:00] NVIDIA GH200 120GB
#  Rank  1 Group  0 Pid 221421 on    gpu-1 device  1 [0019:01:00] NVIDIA GH200 120GB
#  Rank  2 Group  0 Pid 201122 on    gpu-2 device  0 [0009:01:00] NVIDIA GH200 120GB
#  Rank  3 Group  0 Pid 201121 on    gpu-2 device  1 [0019:01:00] NVIDIA GH200 120GB
"""
RUN = "# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1\n#\n"
NEW = f"""\
mpirun: a warning of somebody else
# nccl-tests version 2.17.6 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_gather_perf
{RUN}# Using devices
{DEVICES}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
           0             0     float    none      -1     0.15    0.00    0.00       0     0.12    0.00    0.00       0
        4096           256     float    none      -1    45.33    0.02    0.04       0    37.98    0.03    0.05     N/A
       16384          1024     float    none      -1    10257.0  0.05    0.10       0    38.30    0.05    0.10     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 20.6323
"""
OLD = f"""\
NCCL version 2.7.8+cuda11.0
{RUN}{DEVICES}#
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256   float     sum    15.00    0.07    0.10  1e-07    14.00    0.07    0.10  1e-07
"""


@pytest.fixture
def log(tmp_path):
    def write(text, name="log.txt"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_new_columns_of_nccl_tests(log):
    rows = read_log(log(NEW))
    assert [row.transfer for row in rows] == [
        CollectiveTransfer("all_gather", 1024, 4, 2),  # a quarter of the whole buffer is what a rank puts in
        CollectiveTransfer("all_gather", 4096, 4, 2),
    ]
    assert [row.seconds for row in rows] == pytest.approx([45.33e-6, 10257e-6])
    assert {row.nccl for row in rows} == {"2.27.3"}


def test_old_columns_of_nccl_tests_take_the_kind_from_the_files_name(log):
    row = read_log(log(OLD, "all_reduce_perf.8.txt"))[0]
    assert row.transfer == CollectiveTransfer("all_reduce", 1024, 4, 2)
    assert (row.seconds, row.nccl) == (pytest.approx(15e-6), "2.7.8")
    with pytest.raises(InputError, match=r"log\.txt:11: does not say which collective ran.*--collective"):
        read_log(log(OLD))
    assert read_log(log(OLD), Given(kind="reduce_scatter"))[0].transfer.kind == "reduce_scatter"


def test_several_runs_in_a_file(log):
    two = NEW + NEW.replace("all_gather_perf", "sendrecv_perf").replace("gpu-2", "gpu-1")
    rows = read_log(log(two))
    assert rows[-1].transfer == CollectiveTransfer("send_recv", 16384, 2, 1) and len(rows) == 4


def test_what_launchers_put_before_lines_is_taken_off(log):
    for before in ("[1,0]<stdout>:", "[1,12]<stdout>: ", "0: ", " 3: "):
        tagged = "".join(f"{before}{line}\n" for line in NEW.splitlines())
        assert read_log(log(tagged)) == read_log(log(NEW))


def test_time_stamps_and_cut_lines(log):
    stamped = NEW.replace("busbw  #wrong\n#        (B)", "busbw  #wrong timestamp\n#        (B)")
    rows = [line + "  2025-10-01 12:00:00" if "float" in line else line for line in stamped.splitlines()]
    assert read_log(log("\n".join(rows))) == read_log(log(NEW))
    cut = NEW[: NEW.index("10257.0") + 3]  # the run was stopped while it wrote the last line
    assert [row.transfer.size_bytes for row in read_log(log(cut))] == [1024]


JSON = {
    "version": 1,
    "args": ["./build/reduce_scatter_perf", "-J", "out.json"],
    "nccl_version": 22803,
    "config": {
        "nthreads": 1,
        "ngpus": 4,
        "devices": [
            {"rank": 0, "group": 0, "hostname": "a", "device": 0},
            {"rank": 4, "group": 0, "hostname": "b", "device": 0},
        ],
    },
    "results": [
        {
            "size": 4096,
            "out_of_place": {"time": 40.5, "alg_bw": 0.1, "bus_bw": 0.09, "nwrong": 0.0},
            "in_place": {"time": 39.5, "alg_bw": 0.1, "bus_bw": 0.09, "nwrong": None},
        }
    ],
}


def test_json_of_nccl_tests(log):
    row = read_log(log(json.dumps(JSON), "out.json"))[0]
    # One process of four GPUs on each of two hosts.
    assert row.transfer == CollectiveTransfer("reduce_scatter", 4096, 8, 2)
    assert (row.seconds, row.nccl) == (pytest.approx(40.5e-6), "2.28.3")
    sized = json.dumps(JSON).replace('"size": 4096', '"size": 4096, "count": "COUNT", "type": "float"')
    wrong = json.dumps(JSON).replace('"nwrong": 0.0', '"nwrong": 3.0')
    for text, message in (
        (json.dumps(JSON)[:-40], "not the JSON that nccl-tests writes"),
        ('{"results": []}', "not the JSON that nccl-tests writes"),
        (wrong, "size 4096: nccl-tests found wrong results"),
        (sized.replace("COUNT", "0"), "size 4096: 0 elements of float are not 4096 bytes"),
        (sized.replace("float", "x"), "size 4096: element type 'x' is none of nccl-tests"),
        (json.dumps(JSON).replace('"ngpus": 4', '"ngpus": 4000000'), "4000000 GPUs of one process"),
        (json.dumps(JSON).replace('"time"', '"cpu_time"'), "run nccl-tests without -C"),
    ):
        with pytest.raises(InputError, match=message):
            read_log(log(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "no measured sizes; give the output of nccl-tests"),
        (NEW.replace("all_gather_perf", "gather_perf"), "collective gather_perf is not modelled; known: all_reduce"),
        (NEW.replace(DEVICES, ""), "does not say how many ranks ran; give --ranks N"),
        (NEW.replace("0.04       0", "0.04       7"), "wrong results"),
        (NEW.replace("0.04       0", "0.04   1e+06"), "wrong results"),
        (NEW.replace("values : 0 OK", "values : 7 FAILED"), r"log\.txt:18: nccl-tests found wrong results"),
        (NEW.replace("256     float", "0     float"), "0 elements of float are not 4096 bytes"),
        (NEW.replace("256     float", "2048     float"), "2048 elements of float are not 4096 bytes"),
        (NEW.replace("256     float", "25\u00b2     float"), "25\u00b2 elements of float are not 4096 bytes"),
        (NEW.replace("256     float", "256         x"), r"log\.txt:16: element type 'x' is none of nccl-tests"),
        (NEW.replace("   45.33", "     nan"), "4096 bytes in nan s are no measurement"),
        (NEW.replace("   45.33", "   -45.3"), "are no measurement; run it again"),
        (NEW.replace("    time ", " cputime "), "run nccl-tests without -C"),
        (NEW.replace("Rank  3 Group  0", "Rank  3 Group  1"), "2 groups ran at once"),
        (NEW.replace("   45.33", "     N/A"), "no time in microseconds"),
    ],
)
def test_what_a_log_lacks_is_said(log, text, message):
    with pytest.raises(InputError, match=message):
        read_log(log(text))


@pytest.mark.parametrize(("text", "name"), [(NEW, "log.txt"), (json.dumps(JSON), "log.json")])
def test_a_collective_that_the_log_contradicts_is_refused(log, text, name):
    with pytest.raises(InputError, match=r"ran, and --collective says broadcast; leave --collective out"):
        read_log(log(text, name), Given("broadcast"))


def test_names_of_kinds():
    names = {"all_reduce_perf": "all_reduce", "alltoall_perf": "all_to_all", "AllGather": "all_gather"}
    assert {name: transfer_kind(name) for name in names} == names and transfer_kind("log") is None


def test_fit_makes_a_calibration_that_the_model_uses(log, capsys, user_machines):
    path = log(NEW.replace("10257.0", "90.000 ").replace("all_gather", "all_reduce"))
    assert main(["fit", "--nccl-log", str(path), "--machine", "dgx-h100"]) == 0
    assert "collectives.json" in capsys.readouterr().out
    assert (user_machines / "calibration" / "dgx-h100" / "collectives.json").exists()
    cluster = load_cluster("dgx-h100", 4, 2)
    estimate = collective_cost_model(cluster).estimate([CollectiveTransfer("all_reduce", 4096, 4, 2)])[0]
    assert estimate.seconds == pytest.approx(45.33e-6, rel=1e-3) and estimate.source == "fitted"
    assert estimate.breakdown["nccl"] == "2.27.3"


def test_fit_says_what_it_understood_and_what_it_replaces(log, capsys, user_machines, tmp_path):
    folders = [tmp_path / name for name in ("first", "second")]
    for folder, text in zip(folders, (OLD, OLD.replace("1024           256", "2048           512")), strict=True):
        folder.mkdir()
        (folder / "all_reduce_perf.txt").write_text(text)
    logs = [str(folder / "all_reduce_perf.txt") for folder in folders]
    assert main(["fit", "--nccl-log", logs[0], "--nccl-log", logs[1], "--machine", "dgx-h100"]) == 0
    heard = capsys.readouterr().err
    assert heard.count("all_reduce among 4 ranks on 2 node(s), NCCL 2.7.8: 1 sizes") == 2 and "replaced" not in heard
    known = read_calibration(user_machines / "calibration" / "dgx-h100" / "collectives.json")
    assert known.sweeps[0].sizes == (1024.0, 2048.0)  # of both files, whose names are alike
    assert known.provenance["logs"] == dict.fromkeys(logs, 1)
    assert main(["fit", "--nccl-log", logs[1], "--machine", "dgx-h100"]) == 0
    assert "replaced; to keep what was in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--machine"),
        (("--machine", "no-such"), "unknown machine 'no-such'"),
        (("--machine", "dgx-h100", "--ranks", "2", "--nodes", "4"), "4 nodes and 2 ranks"),
        (("--machine", "dgx-h100", "--steps", "x"), "give one of --table, --steps, --nccl-log"),
        (("--machine", "dgx-h100", "-o", "/dev/null"), "-o /dev/null/fitted.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_status_2(log, capsys, arguments, message):
    status = main(["fit", "--nccl-log", str(log(NEW)), *arguments])
    error = capsys.readouterr().err
    assert status == 2 and error.startswith("error: ") and message in error and error.count("\n") == 1
    assert main(["fit", "--nccl-log", "no/such.txt", "--machine", "dgx-h100"]) == 2
    assert "no/such.txt: cannot be read" in capsys.readouterr().err


def test_a_log_of_more_gpus_than_a_node_holds_is_of_another_cluster(log, capsys, user_machines):
    path, four = str(log(OLD, "all_reduce_perf.txt")), ("--machine", "a100-pairwise", "--ranks")
    assert main(["fit", "--nccl-log", path, *four, "8", "--nodes", "1"]) == 2
    assert "8 ranks on 1 node(s), but a node of a100-pairwise has 4 GPUs" in capsys.readouterr().err
    assert main(["fit", "--nccl-log", path, *four, "8", "--nodes", "2"]) == 0


@pytest.mark.parametrize("option", ["--ranks", "--nodes"])
def test_counts_that_cannot_be_are_not_taken_for_not_given(log, option):
    assert main(["fit", "--nccl-log", str(log(NEW)), "--machine", "dgx-h100", option, "0"]) == 2


def test_tables_of_the_suite_are_logs_too(log):
    header = "operator,median_s,minimum_s,calls,dtype,nccl,error\n"
    operator = '"{""type"":""CollectiveTransfer"",""kind"":""all_reduce"",""size_bytes"":512.0,""ranks"":2}"'
    rows = read_own_table(log(f"{header}{operator},1e-5,1e-5,50,bfloat16,2.27.3,\n{operator},,,,,,failed\n", "t.csv"))
    assert [(row.transfer.ranks, row.seconds, row.nccl) for row in rows] == [(2, 1e-5, "2.27.3")]
    with pytest.raises(InputError, match="not a sweep of collectives"):
        read_own_table(log("a,b\n1,2\n", "u.csv"))
