"""Host overheads: samples from a drawn profile, fences, means, fall-back, files, inflation; the committed tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.machines.machine_file import load_machine, machine_files
from e2e.price.host_overheads import (
    KINDS,
    SAME_HOST,
    Inflation,
    OverheadTable,
    fit_table,
    foreign_host_note,
    known_hosts,
    level_of,
    load_inflation,
    load_overheads,
    load_table,
    merge_tables,
    of_other_jobs,
    overhead_family,
    save_table,
    without_hiccups,
)
from e2e.price.overhead_samples import OverheadSample, OverheadSamples, extract
from e2e.traces.kineto import read_kineto
from lab.fit.host_overheads import (
    H200_NAME,
    INFLATION_FILE,
    NEWER_NAME,
    SHARED_NAME,
    STACKS,
    fit_shared_tables,
    generated_launches,
    measured_host,
    newer_servers,
    with_operators_of,
)
from tests.e2e.recorded_traces import AUTOGRAD, DATA, LINEAR, Profile, recorded

US = 1e-6
TABLES = Path(__file__).resolve().parents[3] / "costmodel" / "calibration" / "host_overheads"


def drawn(tmp_path: Path) -> OverheadSamples:
    """linear(0..40, around addmm 5..35 with launches at 10..14 and 20..23), view 50..53, item 60..90 that waits."""
    profile = Profile()
    profile.operator("aten::linear", 0, 40)
    profile.operator("aten::addmm", 5, 30)
    profile.launch(10, 4, 15, 60)
    profile.launch(20, 3, 76, 4)
    profile.operator("aten::view", 50, 3)
    profile.operator("aten::item", 60, 30)
    profile.runtime("cudaStreamSynchronize", 65, 20)
    return extract(read_kineto(profile.write(tmp_path / "k.json")))


def microseconds(samples: OverheadSamples) -> dict[tuple[str, str], list[float]]:
    return {key: [round(s.seconds / US, 6) for s in values] for key, values in samples.values.items()}


def test_every_level_of_nesting_has_its_own_pieces(tmp_path: Path) -> None:
    assert microseconds(drawn(tmp_path)) == {
        ("T2", "aten::linear"): [10],
        ("T2", "aten::addmm"): [5],
        ("T4", "cudaLaunchKernel"): [4, 3],
        ("T5", "aten::linear"): [6],
        ("T5", "aten::addmm"): [6],
        ("T3", "aten::addmm"): [12],
        ("T3", "aten::linear"): [17],
        ("T1", "aten::view"): [10],
        ("whole", "aten::view"): [3],
        ("T1", "aten::item"): [7],
        # 20 us of the call: 15 until the last kernel ends (80), 5 its own cost; neither is part of the operator.
        ("T4", "cudaStreamSynchronize"): [5],
        ("whole", "aten::item"): [10],
    }


def test_records_inside_a_piece_are_counted(tmp_path: Path) -> None:
    values = drawn(tmp_path).values
    # Before the first launch linear's piece holds the beginning of addmm: half a record.
    assert values["T2", "aten::linear"][0].operators == 0.5
    assert values["T3", "aten::linear"][0].operators == 1.0  # the ends of addmm and linear
    assert values["T1", "aten::view"][0].operators == 0.5
    assert values["T4", "cudaLaunchKernel"][0].calls == 1


def test_waiting_for_another_thread_is_no_gap(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("aten::mm", 0, 10)
    profile.operator("autograd::engine::evaluate_function: A", 15, 20, thread=AUTOGRAD)
    profile.operator("autograd::engine::evaluate_function: B", 38, 20, thread=AUTOGRAD)
    profile.operator("aten::add", 60, 10)
    found = microseconds(extract(read_kineto(profile.write(tmp_path / "k.json"))))
    assert found["T1", "aten::add"] == [7]  # 5 before and 2 after the helper
    assert found["T1", "autograd::engine::evaluate_function: B"] == [3]
    assert ("T1", "autograd::engine::evaluate_function: A") not in found


def table(seconds: float = 10 * US, count: int = 1000, inflation: Inflation | None = None) -> OverheadTable:
    """Every kind has aten::add (``seconds``), aten::mul (30 us) and other::thing (100 us)."""
    rows = {"aten::add": (seconds, count), "aten::mul": (30 * US, 1000), "other::thing": (100 * US, 500)}
    values = {
        (kind, name): [OverheadSample(value, 1.0, 2.0)] * number
        for kind in KINDS
        for name, (value, number) in rows.items()
    }
    return fit_table("toy", [OverheadSamples(values, "file", "gpu", 7, 8)], inflation)


def test_an_operator_seen_often_has_its_own_mean_others_fall_back() -> None:
    toy = table()
    assert toy.seconds("T2", "aten::add") == pytest.approx(10 * US, rel=0.01)
    assert toy.seconds("T2", "aten::add_") == pytest.approx(10 * US, rel=0.01)
    assert toy.seconds("T2", "aten::unknown") == pytest.approx(20 * US)
    assert toy.seconds("T2", "never::seen") == pytest.approx((10 + 30 + 50) / 2.5 * US)
    assert (toy.count("T2", "aten::add"), toy.count("T2", "aten::unknown")) == (1000, 0)


def test_fewer_samples_lean_monotonically_to_the_family() -> None:
    priced = [table(count=count).seconds("T2", "aten::add") for count in (1, 2, 5, 20, 100)]
    assert priced == sorted(priced, reverse=True)
    assert 10 * US < priced[-1] < priced[0] < 30 * US


def test_inflation_is_taken_out_by_records() -> None:
    inflation = Inflation(3 * US, 1.5 * US, "test")
    assert table(inflation=inflation).seconds("T1", "aten::add") == pytest.approx((10 - 3 - 2 * 1.5) * US, rel=0.02)
    assert Inflation(1.0, 1.0, "test").without(table().defaults["T1"]) == 0.0


def test_merging_weighs_by_samples() -> None:
    merged = merge_tables("both", [table(10 * US, 300), table(20 * US, 100)])
    assert merged.means["T3"]["aten::add"].seconds == pytest.approx(12.5 * US)
    assert merged.means["T3"]["aten::add"].count == 400
    assert len(merged.sources) == 2


def test_tables_come_back_from_their_file(tmp_path: Path) -> None:
    toy = table(inflation=Inflation(1e-7, 2e-7, "test"))
    save_table(toy, tmp_path / "sub" / "toy.json")
    again = load_table(tmp_path / "sub" / "toy.json")
    assert again.sources == toy.sources
    assert again.inflation == toy.inflation
    for kind in KINDS:
        for name in ("aten::add", "aten::unknown", "never::seen"):
            assert again.seconds(kind, name) == pytest.approx(toy.seconds(kind, name), rel=1e-3)
    (tmp_path / "i.json").write_text('{"operator_seconds": 1e-7, "call_seconds": 2e-7, "origin": "test"}')
    assert load_inflation(tmp_path / "i.json") == Inflation(1e-7, 2e-7, "test")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "no JSON"), ("[]", "must be a mapping"), ("{}", "format: missing"), ('{"format": 99}', "format: ")],
)
def test_files_that_are_no_table(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load_table(tmp_path / "t.json")
    assert str(tmp_path / "t.json") in str(caught.value)


def test_missing_files_and_kinds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_table(tmp_path / "none.json")
    (tmp_path / "i.json").write_text("{}")
    with pytest.raises(InputError, match="operator_seconds"):
        load_inflation(tmp_path / "i.json")
    with pytest.raises(InputError, match="no sample of T1"):
        fit_table("empty", [OverheadSamples({})])
    (tmp_path / INFLATION_FILE).write_text((TABLES / INFLATION_FILE).read_text())
    with pytest.raises(InputError, match=r"linear_kineto\.json\.gz: missing"):
        fit_shared_tables(tmp_path, tmp_path)


@pytest.mark.parametrize("name", [*STACKS, SHARED_NAME, NEWER_NAME, H200_NAME])
def test_committed_tables_are_complete(name: str) -> None:
    committed = load_table(TABLES / f"{name}.json")
    assert committed.sources
    without = name in (NEWER_NAME, H200_NAME)  # the profiler's share is taken out already
    assert committed.inflation == (None if without else load_inflation(TABLES / INFLATION_FILE))
    for kind in KINDS:
        assert 0 < committed.seconds(kind, "aten::never_seen") < 1e-3
    # Launching costs between 2 and 30 us on every host that was recorded.
    assert 2 * US < committed.seconds("T4", "cudaLaunchKernel") < 30 * US


@pytest.mark.thorough
def test_real_tables_are_reproduced_from_the_profiles(tmp_path: Path) -> None:
    recorded(LINEAR)
    for name in (INFLATION_FILE, f"{H200_NAME}.json"):
        (tmp_path / name).write_text((TABLES / name).read_text())
    for fitted in fit_shared_tables(DATA.parent, tmp_path):
        committed = json.loads((TABLES / f"{fitted.name}.json").read_text())
        assert json.loads((tmp_path / f"{fitted.name}.json").read_text()) == committed


def test_real_profiles_every_operator_is_sampled_once() -> None:
    """Each operator launches (T2 and T3) or does not (whole); each launch has its T4."""
    kineto = read_kineto(recorded(LINEAR))
    samples = extract(kineto)
    launches = samples.values["T4", "cudaLaunchKernel"]
    assert len(launches) == sum(call.name == "cudaLaunchKernel" for call in kineto.runtime)
    counts = {kind: sum(len(v) for (k, _), v in samples.values.items() if k == kind) for kind in ("T2", "T3", "whole")}
    assert counts["T2"] == counts["T3"]
    assert counts["T2"] + counts["whole"] == len(kineto.operators)


def test_a_table_says_itself_how_far_its_host_may_be_off(tmp_path: Path) -> None:
    """Whatever its name is; one that does not say is of the user's own host."""
    shared = load_table(TABLES / f"{SHARED_NAME}.json")
    save_table(replace(shared, name="mine", factor=1.25), tmp_path / "mine.json")
    assert load_table(tmp_path / "mine.json").factor == 1.25
    document = json.loads((tmp_path / "mine.json").read_text())
    del document["factor"]
    (tmp_path / "mine.json").write_text(json.dumps(document | {"name": SHARED_NAME}))
    assert load_table(tmp_path / "mine.json").factor == 1.0
    (tmp_path / "mine.json").write_text(json.dumps(document | {"factor": 0.5}))
    with pytest.raises(InputError, match=r"mine\.json: corrupt \(factor: Input should be greater"):
        load_table(tmp_path / "mine.json")


def test_the_host_of_a_gpu_is_that_of_its_generation_or_the_one_named(tmp_path: Path) -> None:
    assert load_overheads().name == load_overheads(architecture="ampere").name == SHARED_NAME
    assert load_overheads(architecture="hopper").name == load_overheads(Path(NEWER_NAME)).name == NEWER_NAME
    for machine in (load_machine(name) for name in machine_files()):
        if machine.kind == "gpu":
            newer = machine.chip().compute_capability >= (8, 9)
            found = load_overheads(architecture=machine.chip().architecture).name
            assert found == (NEWER_NAME if newer else SHARED_NAME), machine.name
    assert load_overheads(Path("v100-resnet50"), "hopper").name == "v100-resnet50"
    assert set(known_hosts()) == {*STACKS, SHARED_NAME, NEWER_NAME, H200_NAME}
    with pytest.raises(InputError, match="no host of that name; known: a100-resnet50-ddp, h200-server"):
        load_overheads(Path("my-host"))
    assert NEWER_NAME in foreign_host_note(load_overheads(architecture="hopper"))
    assert foreign_host_note(load_overheads(Path("v100-resnet50"))) == ""


def test_what_a_job_computes_on_the_host_is_not_the_host_of_other_jobs() -> None:
    own = table()
    mean = own.means["whole"]["aten::add"]
    drawn = replace(mean, seconds=1.4e-3, count=2, operators=2.5)
    whole = {**own.means["whole"], "aten::rand": drawn, "aten::cat": replace(drawn, operators=64.0), "lookup": drawn}
    found = of_other_jobs(replace(own, means={**own.means, "whole": whole}))
    assert set(found.means["whole"]) == {*own.means["whole"], "aten::cat", "lookup"}
    assert found.seconds("whole", "aten::rand") < 1e-4 and found.factor == SAME_HOST


def test_newer_servers_are_half_way_between_the_two_known() -> None:
    """T1 of the one recorded with stacks is not believed; operators that it alone knows go back to the others."""
    old = table(20 * US)
    rows = {("T2", "aten::add"): 10 * US, ("T2", "aten::mul"): 15 * US, ("T2", "aten::fused_attention"): 40 * US}
    rest = {(kind, "aten::add"): (90 if kind == "T1" else 10) * US for kind in KINDS if kind != "T2"}
    samples = {key: [OverheadSample(value, 0.0, 0.0)] * 100 for key, value in {**rows, **rest}.items()}
    recorded_host, measured = fit_table("new", [OverheadSamples(samples)]), replace(table(80 * US), name="measured")
    shared, newer = with_operators_of(old, recorded_host), newer_servers(old, recorded_host, measured)
    assert (shared.level, newer.level) == (1.0, pytest.approx((0.5 * 1.6) ** 0.5, rel=1e-3))
    assert newer.means["T1"]["aten::add"].seconds == pytest.approx(80 * US * newer.level / 1.6)
    assert newer.means["T2"]["aten::fused_attention"].seconds == pytest.approx(40 * US * newer.level / 0.5)
    assert shared.means["T2"]["aten::fused_attention"].seconds == pytest.approx(80 * US)
    assert shared.means["T2"]["aten::add"].seconds == pytest.approx(20 * US)


def test_a_profile_is_shortened_to_the_step_without_the_profiler(tmp_path: Path) -> None:
    """By the table that the overheads suite wrote beside it; without one only the records' cost is taken out."""
    profile = Profile()
    for step in range(4):
        profile.host("user_annotation", f"ProfilerStep#{step}", 100.0 * step, 100)
        profile.operator("aten::add", 100.0 * step + 10, 40)
        profile.launch(100.0 * step + 20, 10, 100.0 * step + 32, 2)
    path = profile.write(tmp_path / "overheads-mlp.json")
    launch = load_overheads(path).means["T4"]["cudaLaunchKernel"].seconds
    assert launch == pytest.approx(10 * US)
    rows = "quantity,median_s,trace\nstep mlp,5e-05,\nprofiled step mlp,1e-04,overheads-mlp.json\n"
    (tmp_path / "overheads.csv").write_text(rows)
    ratio = 50 / (100 - 0.573)
    assert load_overheads(path).means["T4"]["cudaLaunchKernel"].seconds == pytest.approx(10 * US * ratio)
    own = load_overheads(path)
    told = "measured on other jobs (the interval takes them up to 1.35 times as short or long)"
    assert own.factor == SAME_HOST and told in foreign_host_note(own)
    assert own.level == pytest.approx(level_of(own, load_overheads()))
    (tmp_path / "programs.csv").write_text(f"trace,median_s\n{path.name},2.5e-05\nmissing.json,1\n")
    assert measured_host(tmp_path).means["T4"]["cudaLaunchKernel"].seconds == pytest.approx(10 * US * ratio / 2)
    (tmp_path / "programs.csv").write_text(f"trace,median_s\n{path.name},2.5e-06\n")
    with pytest.raises(InputError, match="no program that its host limits"):
        measured_host(tmp_path)
    (tmp_path / "overheads.csv").write_text(rows.replace("5e-05", "none"))
    with pytest.raises(InputError, match=r"overheads\.csv: no seconds of 'profiled step mlp'"):
        load_overheads(path)


def test_python_of_a_measured_program_is_no_gap_of_its_operators(tmp_path: Path) -> None:
    profile = Profile()
    for step in range(4):
        profile.host("user_annotation", f"ProfilerStep#{step}", 1000.0 * step, 1000)
        profile.operator("aten::add", 1000.0 * step + 10, 40)
        profile.launch(1000.0 * step + 20, 10, 1000.0 * step + 32, 2)
        profile.operator("aten::detach", 1000.0 * step + 450, 3)  # 400 after the addition
    path = profile.write(tmp_path / "program.json")
    (tmp_path / "programs.csv").write_text(f"trace,median_s\n{path.name},1e-03\n")
    gap = measured_host(tmp_path).means["T1"]["aten::detach"].seconds
    assert gap == pytest.approx(20 * US, rel=0.05)


def test_operators_with_lists_do_not_take_what_came_before_them_in_one_recording() -> None:
    rows = {("T1", "aten::_foreach_mul_"): 784 * US, ("T2", "aten::_foreach_mul_"): 78 * US}
    base = {(kind, "aten::add"): 10 * US for kind in KINDS} | {("T3", "aten::_foreach_mul_"): 8 * US}
    samples = {key: [OverheadSample(value, 0.0, 0.0)] * 4 for key, value in {**base, **rows}.items()}
    samples |= {(kind, "aten::add"): samples[kind, "aten::add"] * 1000 for kind in KINDS}
    toy = fit_table("toy", [OverheadSamples(samples)])
    assert toy.seconds("T1", "aten::_foreach_mul_") == toy.seconds("T1", "aten::unknown") < 11 * US
    assert toy.seconds("T2", "aten::_foreach_mul_") < 11 * US
    assert toy.seconds("T3", "aten::_foreach_mul_") == pytest.approx(8.7 * US, rel=0.02)


def test_collectives_have_one_family_by_any_name() -> None:
    assert (
        overhead_family("_c10d_functional::all_gather_into_tensor")
        == overhead_family("c10d::_allgather_base_")
        == "c10d"
    )


def test_what_comes_back_in_every_step_is_no_hiccup() -> None:
    """Twenty quick pieces and one long one in each of four steps; a single start-up piece is still left out."""
    quick = [OverheadSample((1 + place % 3) * US, 0, 0) for place in range(80)]
    long = [OverheadSample(900 * US, 0, 0)] * 3 + [OverheadSample(100 * US, 0, 0)]
    start_up = [OverheadSample(1.0, 0, 0)]
    kept = without_hiccups([*quick, *long, *start_up], steps=4)
    assert sorted(sample.seconds for sample in kept)[-4:] == pytest.approx([100 * US, *[900 * US] * 3])
    assert len(kept) == 84
    # Seen in one of ten steps only it is a hiccup.
    assert len(without_hiccups([*quick, *long[:1]], steps=10)) == 80


def test_gaps_at_borders_of_marked_ranges_have_names_of_their_own(tmp_path: Path) -> None:
    profile = Profile()
    for start in (0, 60, 100):
        profile.operator("aten::view", start, 10)
    profile.operator("aten::add_", 300, 10)
    profile.host("user_annotation", "## forward ##", 20, 70)  # begins in the gap 10..60, ends in 70..100
    profile.host("user_annotation", "## empty ##", 62, 3)  # around no operator: an execution trace does not tell of it
    profile.host("user_annotation", "Optimizer.step#SGD.step", 200, 120)
    found = microseconds(extract(read_kineto(profile.write(tmp_path / "k.json"))))
    assert found["T1", "annotation"] == [50, 30]
    assert found["T1", "Optimizer.step"] == [190]
    assert ("T1", "aten::view") not in found and ("T1", "aten::add_") not in found


def test_launches_of_generated_kernels_take_what_is_between_them(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("## Call CompiledFxGraph f3a ##", 0, 100)
    profile.operator("triton_poi_fused_add_0", 30, 10)  # the first has the beginning of the graph before it
    profile.operator("aten::mm", 45, 5)
    profile.operator("triton_per_fused_sum_1", 62, 20)
    profile.launch(65, 4, 90, 5)
    profile.operator("triton_poi_fused_mul_2", 85, 5)
    found = generated_launches(read_kineto(profile.write(tmp_path / "k.json")))
    assert [round(each.seconds / US, 6) for each in found] == [28, 8]  # 82 - 50 - 4, 90 - 82


def test_a_copy_that_waits_for_another_stream_is_no_launch_cost(tmp_path: Path) -> None:
    """The copy is on an idle stream, which waits for a collective of stream 9 that ends at 500."""
    profile = Profile()
    profile.operator("aten::copy_", 0, 10)
    profile.launch(2, 5, 10, 490, stream=9, name="ncclKernel")
    for start in (20, 30, 40):
        profile.operator("aten::copy_", start, 8)
        profile.launch(start + 1, 5, start + 3, 2, stream=7, call="cudaMemcpyAsync", category="gpu_memcpy", name="HtoD")
    profile.operator("aten::to", 100, 420)
    name = "Memcpy DtoH (Device -> Pageable)"
    profile.launch(102, 410, 505, 2, stream=24, call="cudaMemcpyAsync", category="gpu_memcpy", name=name)
    found = microseconds(extract(read_kineto(profile.write(tmp_path / "k.json"))))
    # The usual 5 of the call and the 5 that it takes from the copy's end to its return.
    assert sorted(found["T4", "cudaMemcpyAsync"]) == [5, 5, 5, 10]


def test_pieces_of_unknown_operators_grow_with_what_is_inside() -> None:
    def sample(seconds: float, operators: float) -> OverheadSample:
        return OverheadSample(seconds * US, operators, 0)

    values = {(kind, "aten::x"): [sample(2, 0)] for kind in KINDS}
    values |= {("T5", "aten::y"): [sample(12, 2)], ("T5", "aten::z"): [sample(22, 4)]}
    table = fit_table("made", [OverheadSamples(values)])
    assert table.growth["T5"].base == pytest.approx(2 * US) and table.growth["T5"].each == pytest.approx(5 * US)
    assert table.seconds("T5", "mine::unknown", 3.0) == pytest.approx(17 * US)
    # Nothing is told of what is inside, or nothing of the kind has anything inside: the family, or the kind.
    assert table.seconds("T5", "mine::unknown") == pytest.approx(12 * US)
    assert table.seconds("T2", "mine::unknown", 3.0) == pytest.approx(2 * US)


def test_profiles_are_a_table_of_their_own_job(tmp_path: Path) -> None:
    profile = Profile()
    for start in (0, 100):
        profile.operator("aten::mm", start, 40)
        profile.launch(start + 10, 4, start + 15, 5)
        profile.launch(start + 20, 4, start + 26, 5)
        profile.operator("aten::view", start + 50, 3)
    path = profile.write(tmp_path / "rank0.json")
    for given in (path, tmp_path / "rank*.json"):
        assert load_overheads(given).count("T1", "aten::view") == 2
    assert load_overheads(TABLES / "shared.json").name == SHARED_NAME
    with pytest.raises(InputError, match=r"absent\.json: cannot be read"):
        load_overheads(tmp_path / "absent.json")
