"""Plans: round trips, strictness, TorchRec's form, the command, and the step of a sharded DLRM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from costmodel.base.errors import InputError
from costmodel.gpu.embedding_tables import read_table_file
from costmodel.machines.cluster import load_cluster
from e2e.commands.cli import app
from e2e.commands.shard_command import with_statistics
from e2e.sharding.placement import TablePlacement
from e2e.sharding.plan import (
    PlannedTable,
    RankLoad,
    TablePlan,
    load_plan,
    plan_of,
    plan_record,
    save_plan,
    save_torchrec,
    torchrec_plan,
    torchrec_record,
)
from e2e.sharding.planner import SearchEffort, find_plan
from tests.e2e.sharding import toy_sharding as toy

RUN = CliRunner()
TABLES = """
origin: drawn for this test
defaults: {dim: 64, pooling: 10, optimizer: rowwise_adagrad}
tables:
  - {name: user, rows: 5000000}
  - {name: item, rows: 200000, count: 3}
  - {name: country, rows: 200, pooling: 1}
model: {bottom: [32, 64], top: [128, 1]}
"""


def plan(*tables: PlannedTable, gpus: int = 4) -> TablePlan:
    ranks = tuple(RankLoad(rank, 1, 1e-3, 2e-3, 100, 200, 300) for rank in range(gpus))
    return TablePlan(
        "toy", gpus, 1, 8, tables, ranks, "local search", 1e-3, 0.0, 9e-4, 1000, {"size": 2e-3, "lookup": None}
    )


FOUR_KINDS = plan(
    PlannedTable(TablePlacement("whole", "table-wise", (2,)), 10, 64),
    PlannedTable(TablePlacement("columns", "column-wise", (3, 1)), 20, 128),
    PlannedTable(TablePlacement("rows", "row-wise", (0, 1, 2, 3)), 10, 32),
    PlannedTable(TablePlacement("copies", "data-parallel", (0, 1, 2, 3)), 5, 32),
)


def test_a_found_plan_comes_back_from_its_file(tmp_path):
    planning = find_plan(toy.toy_problem([toy.table("a"), toy.table("b", dim=128)], 2), SearchEffort(1.0, 2, 20))
    found = plan_of(planning)
    save_plan(found, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == found
    assert found.step_seconds == planning.best.simulated
    assert [rank.memory_bytes for rank in found.ranks] == [round(each) for each in planning.best.state.memory()]


def test_all_kinds_come_back(tmp_path):
    save_plan(FOUR_KINDS, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == FOUR_KINDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(colour="red"), "colour"),
        (lambda record: record.pop("gpus"), "gpus"),
        (lambda record: record.update(format=2), "format"),
        (lambda record: record["tables"][0].update(ranks=[7]), "rank 7 of 4 GPUs"),
        (lambda record: record["tables"][0].update(ranks=[0, 1]), "table-wise is on one rank"),
        (lambda record: record["tables"][1].update(ranks=[1, 1]), "a rank twice"),
        (lambda record: record["tables"][1].update(ranks=[0, 1, 2]), "do not divide into 3 blocks"),
        (lambda record: record["tables"][1].update(ranks=[0]), "column-wise needs at least two ranks"),
        (lambda record: record["tables"][0].update(ranks=[True]), r"tables\.0\.ranks\.0"),
        (lambda record: record["tables"][2].update(ranks=[0, 1]), "row-wise needs all 4 ranks"),
        (lambda record: record["tables"][1].update(table="whole"), "placed twice"),
        (lambda record: record["ranks"].pop(), "ranks are not those of 4 GPUs"),
    ],
)
def test_a_spoilt_plan_is_refused_by_name(tmp_path, change, message):
    record = plan_record(FOUR_KINDS)
    change(record)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record))
    with pytest.raises(InputError, match=message) as caught:
        load_plan(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_plan_at_all_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[1]")
    with pytest.raises(InputError, match=r"plan\.json: not a plan"):
        load_plan(path)


def test_a_plan_of_other_tables_is_refused():
    tables = [toy.table("whole", rows=10, dim=64), toy.table("columns", rows=20, dim=128)]
    with pytest.raises(InputError, match="'other'"):
        FOUR_KINDS.check([*tables, toy.table("other")])
    with pytest.raises(InputError, match="'rows'.* not among"):
        plan(*FOUR_KINDS.tables[:3]).check(tables)
    with pytest.raises(InputError, match="10 x 64"):
        FOUR_KINDS.check([toy.table("whole", rows=11, dim=64)])
    with pytest.raises(InputError, match="has the dtype float16, the plan was made for float32"):
        FOUR_KINDS.check([toy.table("whole", rows=10, dim=64, dtype="float16")])
    with pytest.raises(InputError, match="has the optimizer adam, the plan was made for sgd"):
        FOUR_KINDS.check([toy.table("whole", rows=10, dim=64, optimizer="adam")])


# --- TorchRec --------------------------------------------------------------------------------------


def test_torchrec_form_by_hand():
    tables = torchrec_record(FOUR_KINDS, "ebc")["plan"]["ebc"]
    # A plan that cuts columns has whole tables as one block of columns: one exchange for both.
    assert tables["whole"] == {
        "sharding_type": "column_wise",
        "compute_kernel": "fused",
        "ranks": [2],
        "shards": [{"shard_offsets": [0, 0], "shard_sizes": [10, 64], "placement": "rank:2/cuda:2"}],
    }
    assert [shard["shard_offsets"] for shard in tables["columns"]["shards"]] == [[0, 0], [0, 64]]
    assert [shard["placement"] for shard in tables["columns"]["shards"]] == ["rank:3/cuda:3", "rank:1/cuda:1"]
    # Ten rows on four ranks: three each, one left for the last.
    assert [shard["shard_sizes"] for shard in tables["rows"]["shards"]] == [[3, 32], [3, 32], [3, 32], [1, 32]]
    assert tables["copies"] == {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1, 2, 3]}
    assert torchrec_record(plan(FOUR_KINDS.tables[0]))["plan"].popitem()[1]["whole"]["sharding_type"] == "table_wise"


def test_torchrec_builds_the_plan_and_serialises_it_alike(tmp_path):
    types = pytest.importorskip("torchrec.distributed.types", reason="TorchRec is not installed (extra torchrec)")
    built = torchrec_plan(FOUR_KINDS, "ebc")
    assert isinstance(built, types.ShardingPlan)
    save_torchrec(FOUR_KINDS, tmp_path / "torchrec.json", "ebc")
    assert json.loads(json.dumps(built._serialize())) == json.loads((tmp_path / "torchrec.json").read_text())
    for parameter in built.plan["ebc"].values():
        assert parameter.sharding_type in {each.value for each in types.ShardingType}
    covered = {name: _cells(parameter) for name, parameter in built.plan["ebc"].items() if parameter.sharding_spec}
    assert covered == {"whole": 10 * 64, "columns": 20 * 128, "rows": 10 * 32}


def test_shards_tile_their_tables_by_the_checks_of_torch():
    """Those that a ``ShardedTensor`` runs when ``DistributedModelParallel`` makes it from the plan."""
    pytest.importorskip("torchrec", reason="TorchRec is not installed (extra torchrec)")
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec._internals import check_tensor, validate_non_overlapping_shards_metadata

    built = torchrec_plan(FOUR_KINDS, "ebc")
    sizes = {table.placement.table: (table.rows, table.dim) for table in FOUR_KINDS.tables}
    for name, parameter in built.plan["ebc"].items():
        if parameter.sharding_spec is not None:
            shards: list[ShardMetadata] = parameter.sharding_spec.shards
            validate_non_overlapping_shards_metadata(shards)
            check_tensor(shards, sizes[name])
            assert [shard.placement.rank() for shard in shards] == parameter.ranks


def test_torchrec_trains_under_the_plan(tmp_path):
    """Two processes on CPUs, all four kinds: sharded lookups are the unsharded ones, and the backward pass runs."""
    pytest.importorskip("torchrec", reason="TorchRec is not installed (extra torchrec)")
    kinds = plan(
        PlannedTable(TablePlacement("whole", "table-wise", (1,)), 10, 64),
        PlannedTable(TablePlacement("columns", "column-wise", (1, 0)), 20, 128),
        PlannedTable(TablePlacement("rows", "row-wise", (0, 1)), 11, 32),
        PlannedTable(TablePlacement("copies", "data-parallel", (0, 1)), 5, 32),
        gpus=2,
    )
    save_plan(kinds, tmp_path / "plan.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = [sys.executable, str(Path(__file__).with_name("torchrec_ranks.py")), str(tmp_path / "plan.json"), port]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    ranks = [subprocess.Popen([*script, str(rank)], **pipes) for rank in range(2)]
    for process in ranks:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
        assert output.split()[-2:] == ["difference", "0.0"]


def _cells(parameter) -> int:
    return sum(int(np.prod(shard.shard_sizes)) for shard in parameter.sharding_spec.shards)


# --- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """A folder with tables, batches, a plan and TorchRec's form of it."""
    folder = tmp_path_factory.mktemp("sharding")
    (folder / "tables.yaml").write_text(TABLES)
    rows = np.minimum(np.random.default_rng(0).zipf(1.3, 20_000), 5_000_000) - 1
    np.savez(folder / "batches.npz", **{"user.indices": rows})
    given = ["shard", "--tables", "tables.yaml", "--gpu", "a100-sxm-40gb", "--gpus", "4", "--batch-size", "512"]
    given += ["--indices", "batches.npz", "-o", "plan.json", "--torchrec", "torchrec.json", "--seconds", "1"]
    names = {"tables.yaml", "batches.npz", "plan.json", "torchrec.json"}
    answer = RUN.invoke(app, [str(folder / each) if each in names else each for each in given])
    assert answer.exit_code == 0, answer.output
    (folder / "answer.txt").write_text(answer.output)
    return folder


def test_the_command_writes_and_explains_a_plan(planned):
    found = load_plan(planned / "plan.json")
    assert found.gpus == 4 and found.batch_size == 512 and found.machine == "a100-sxm-40gb"
    found.check(read_table_file(planned / "tables.yaml").tables)
    text = (planned / "answer.txt").read_text()
    for word in ("greedy generator", "normalised-lookup", "memory GiB", "has the most", "no plan takes less than"):
        assert word in text
    tables = json.loads((planned / "torchrec.json").read_text())["plan"]["sparse_arch.embedding_bag_collection"]
    assert set(tables) == {"user", "item_0", "item_1", "item_2", "country"}


def test_the_command_prints_json_alone(planned, tmp_path):
    given = ["shard", "--tables", str(planned / "tables.yaml"), "--gpu", "h100-sxm", "--gpus", "2", "--seconds", "0.5"]
    answer = RUN.invoke(app, [*given, "-o", str(tmp_path / "plan.json"), "--kinds", "table-wise", "--json"])
    assert answer.exit_code == 0, answer.output
    record = json.loads(answer.stdout)
    assert record["plan"] == plan_record(load_plan(tmp_path / "plan.json"))
    assert {table["kind"] for table in record["plan"]["tables"]} == {"table-wise"}
    assert set(record["explanation"]["gains"]) == set(record["plan"]["greedy_seconds"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "toaster"], "unknown machine"),
        (["--kinds", "diagonal"], "expected some of table-wise"),
        (["--indices", "nowhere.npz"], "cannot be read"),
        (["--reserve", "0.99", "--gpus", "1"], "nothing fits on 1 x a100-sxm-40gb"),
        (["--reserve", "nan"], "--reserve"),
        (["--seed", "-1"], "--seed"),
        (["--batch-size", str(10**30)], "--batch-size"),
        (["--gpus", "65537"], "--gpus"),
        (["--torchrec", "/dev/null/plan.json"], "--torchrec /dev/null/plan.json: cannot be written"),
        (["-o", "/dev/null/plan.json"], "-o /dev/null/plan.json: cannot be written (Not a directory)"),
    ],
)
def test_bad_input_is_one_line_and_status_two(planned, tmp_path, options, message):
    given = ["shard", "--tables", str(planned / "tables.yaml"), "--gpu", "a100-sxm-40gb", "--gpus", "4"]
    answer = RUN.invoke(app, [*given, "-o", str(tmp_path / "plan.json"), *options])
    assert answer.exit_code == 2
    assert message in answer.output and answer.output.count("\n") == 1
    assert not (tmp_path / "plan.json").exists()


def test_statistics_replace_those_of_the_file_and_must_fit(planned, tmp_path):
    tables = read_table_file(planned / "tables.yaml").tables
    with_them = with_statistics(tables, planned / "batches.npz")
    assert with_them[0].popularity().unique_rows(10**6) < tables[0].popularity().unique_rows(10**6) / 2
    assert with_them[1:] == tables[1:]
    np.savez(tmp_path / "large.npz", **{"country.indices": np.array([1, 299])})
    with pytest.raises(InputError, match="country: has indices of 300 rows, the table has 200"):
        with_statistics(tables, tmp_path / "large.npz")
    np.savez(tmp_path / "other.npz", **{"planet.indices": np.arange(3)})
    with pytest.raises(InputError, match="none of the tables"):
        with_statistics(tables, tmp_path / "other.npz")


# --- prediction ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(planned):
    from e2e.sharding.sharded_step import sharded_dlrm

    return sharded_dlrm(planned / "plan.json", planned / "tables.yaml", load_cluster("a100-sxm-40gb", 4), 512)


def test_the_graph_of_a_sharded_model_is_complete(planned, sharded):
    found = load_plan(planned / "plan.json")
    kinds = {table.placement.kind for table in found.tables}
    assert len(sharded.graph.ranks) == 4 and set(sharded.memory) == set(range(4))
    for rank in sharded.graph.ranks:
        names = [task.name for task in rank.tasks if task.collective is not None]
        # Both MLPs are small: their gradients fill one bucket, sent behind the last of them.
        assert names.count("all_reduce of gradients") == 1
        assert names.count("all_to_all of lookups") == names.count("all_to_all of lookups gradients") == 1
        assert [task.collective.sequence for task in rank.tasks if task.collective] == list(range(len(names)))
        gemms = sum(type(each).__name__ == "Gemm" for task in rank.tasks for each in task.operators)
        # Three layers: forward, weights, and inputs of all but the first; the interaction is one product and two back.
        assert gemms == 3 + 3 + 2 + 3
        assert any("data-parallel" in name for name in names) == ("data-parallel" in kinds)
    tables = sum(
        each.tables
        for rank in sharded.graph.ranks
        for task in rank.tasks
        for each in task.operators
        if type(each).__name__ == "EmbeddingLookup" and each.direction == "forward"
    )
    assert tables == sum(len(table.placement.ranks) for table in found.tables)


def test_exchanges_belong_to_the_pass_that_they_serve(sharded):
    """The inputs of the next batch to none."""
    for rank in sharded.graph.ranks:
        phases = {task.name: rank.calls[task.call].phase for task in rank.tasks if task.collective is not None}
        assert phases["all_to_all of lookups"] == "forward" and phases["all_to_all of sizes"] == "data"
        assert phases["all_to_all of lookups gradients"] == phases["all_reduce of gradients"] == "backward"


def test_a_top_mlp_may_have_several_outputs(planned, tmp_path):
    from e2e.sharding.sharded_step import sharded_dlrm

    (tmp_path / "tables.yaml").write_text(TABLES.replace("top: [128, 1]", "top: [128, 3]"))
    built = sharded_dlrm(planned / "plan.json", tmp_path / "tables.yaml", load_cluster("a100-sxm-40gb", 4), 64)
    assert len(built.graph.ranks) == 4


def test_memory_of_ranks_holds_their_tables(planned, sharded):
    found = load_plan(planned / "plan.json")
    user = next(table.placement for table in found.tables if table.placement.table == "user")
    for rank, usage in sharded.memory.items():
        assert usage.peak_bytes == sum(usage.breakdown.values())
        assert usage.peak_bytes >= found.ranks[rank].memory_bytes
    share = 5_000_000 * 64 * 4 / len(user.ranks)
    assert all(sharded.memory[rank].breakdown["parameters"] >= share for rank in user.ranks)


def test_predict_takes_the_plan(planned):
    given = ["predict", "--model", "dlrm", "--gpu", "a100-sxm-40gb", "--gpus", "4", "--batch-size", "512", "--json"]
    files = ["--config", str(planned / "tables.yaml"), "--sharding", str(planned / "plan.json")]
    answer = RUN.invoke(app, [*given, *files])
    assert answer.exit_code == 0, answer.output
    record = json.loads(answer.stdout)
    assert record["gpus"] == 4 and record["fits"] is True
    assert record["iteration_seconds"] > load_plan(planned / "plan.json").step_seconds * 0.9
    # The batch is the plan's unless another one is given, which is said.
    own = json.loads(RUN.invoke(app, [*given[:7], "--json", *files]).stdout)
    assert own["iteration_seconds"] == record["iteration_seconds"]
    assert not any("made for" in warning for warning in own["warnings"])
    larger = json.loads(RUN.invoke(app, [*given[:8], "16384", "--json", *files]).stdout)
    assert larger["iteration_seconds"] > record["iteration_seconds"]
    assert any("made for samples per GPU 512, this is 16384" in warning for warning in larger["warnings"])
    compiled = RUN.invoke(app, [*given, "--compile", *files])
    assert compiled.exit_code == 2 and "--compile is no option of a sharded DLRM" in compiled.stderr
    other = RUN.invoke(app, [*given[:6], "8", *given[7:], *files])
    assert other.exit_code == 2 and "is for 4 GPUs" in other.output
