"""Networks that are tried, by a runner whose kernels take the times that the test says."""

from __future__ import annotations

import time

from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs
from fusion.model.conv_graph import Graph, Node, find_sites, unfused_plan
from fusion.tuning import rehearsal
from fusion.tuning.rehearsal import (
    FILE,
    LEAST_ROUNDS,
    LEAST_RUNS,
    MOST_ROUNDS,
    RUNS,
    TURNS_SECONDS,
    RehearsalStore,
    Variant,
    affordable_pool,
    rehearse,
    rounds,
    runs,
    variants,
)
from schedules.contract.cpu_target import CpuTarget
from schedules.measuring.kernel_program import last_uses, plan_buffers
from schedules.measuring.timing_protocol import MeasureOutcome

CPU = CpuTarget(lanes=16, registers=32, mcpu="skylake-avx512", features=(), threads=2, l1_bytes=32768, l2_bytes=1 << 20)
EXPAND = Conv2d(1, 32, 14, 14, 64, (1, 1))
DEPTHWISE = Conv2d(1, 64, 14, 14, 64, (3, 3), padding=(1, 1, 1, 1), groups=64)
REDUCE = Conv2d(1, 64, 14, 14, 32, (1, 1), epilogue=Epilogue(residual="before_activation"))
GRAPH = Graph(
    (
        Node("expand", EXPAND, "x", None, (), "a", ()),
        Node("dw", DEPTHWISE, "a", None, (), "b", ()),
        Node("reduce", REDUCE, "b", "x", (), "c", ()),
        Node("expand2", EXPAND, "c", None, (), "d", ()),
        Node("dw2", DEPTHWISE, "d", None, (), "e", ()),
        Node("reduce2", REDUCE, "e", "c", (), "f", ()),
    ),
    (),
    {"a": 1, "b": 1, "c": 2, "d": 1, "e": 1, "f": 1},
)
SITES = find_sites(GRAPH, CPU)
FUSED = {site.operator.convs: site.operator for site in SITES}
OPERATORS = [EXPAND, DEPTHWISE, REDUCE, *FUSED.values()]
TWO_EACH = {operator: [{"tile": 1}, {"tile": 2}] for operator in OPERATORS}


class Networks:
    """Each kernel takes ``seconds(operator, tile)``."""

    def __init__(self, seconds):
        self.seconds, self.asked = seconds, 0

    def rehearse(self, programs, rounds=5, runs=12):
        self.asked += 1
        times = [tuple(self.seconds(s.candidate[0], s.candidate[1]["tile"]) for s in program) for program in programs]
        return [MeasureOutcome(sum(steps), step_seconds=steps) for steps in times]

    def compilation_seconds(self, candidates):
        return 0.0


def first(tile: int = 1) -> Variant:
    return Variant(unfused_plan(GRAPH), {operator: {"tile": tile} for operator in OPERATORS})


def test_the_variants_contain_every_kernel_in_question():
    tried = list(variants(GRAPH, SITES, TWO_EACH))
    seen = {(group.operator, v.configs[group.operator]["tile"]) for v in tried for group in v.groups}
    assert seen == {(operator, tile) for operator in OPERATORS for tile in (1, 2)}
    assert len(tried) == 8  # two configurations of: apart, each of the two pairs, the whole block


def test_a_kernel_reads_what_the_kernels_before_it_wrote():
    program = first().program()
    assert [(step.data, step.residual) for step in program] == [
        (None, None),
        (0, None),
        (1, None),  # the residual is the network's input, which no kernel wrote
        (2, None),
        (3, None),
        (4, 2),
    ]
    assert last_uses(program) == [1, 2, 5, 4, 5, 5]


def test_buffers_are_reused_but_never_while_they_are_read():
    """Sizes as in a chain with a residual: c (index 2) lives until 5."""
    assert plan_buffers([64, 64, 32, 64, 64, 32], [1, 2, 5, 4, 5, 5]) == [0, 1, 0, 1, 2, 1]
    assert plan_buffers([10, 10, 20], [1, 2, 2]) == [0, 1, 0]  # the free one grows
    assert plan_buffers([1000, 10, 10], [1, 2, 2]) == [0, 1, 2]  # too large to waste on ten bytes


def test_the_best_network_is_found(tmp_path):
    """In the network the second configuration is faster, and the pair of 1x1 and depthwise."""

    def seconds(operator, tile):
        return (1.5 if operator == FUSED[EXPAND, DEPTHWISE] else float(len(getattr(operator, "convs", "1")))) / tile

    runner = Networks(seconds)
    found = rehearse(GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), runner)
    assert found is not None
    assert [type(group.operator) for group in found.plan.groups] == [FusedConvs, Conv2d] * 2
    assert all(config == {"tile": 2} for config in found.configs.values())
    assert found.seconds[EXPAND] == 0.5 and found.seconds[FUSED[EXPAND, DEPTHWISE]] == 0.75


def test_the_first_choice_stays_if_nothing_is_faster_as_a_whole(tmp_path):
    """Kernel by kernel the second configuration seems faster; a network of nothing else is slower."""

    class Interfering(Networks):
        def rehearse(self, programs, rounds=5, runs=12):
            outcomes = super().rehearse(programs)
            alike = [len({step.candidate[1]["tile"] for step in program} - {1}) for program in programs]
            if len(programs) > 3:  # the variants; after them come the finalists
                return outcomes
            return [
                MeasureOutcome(o.seconds * (3 if a else 1), step_seconds=())
                for o, a in zip(outcomes, alike, strict=True)
            ]

    runner = Interfering(lambda operator, tile: float(len(getattr(operator, "convs", "1"))) / tile)
    chosen = first()
    found = rehearse(GRAPH, SITES, TWO_EACH, chosen, RehearsalStore(tmp_path, CPU), runner)
    assert found is not None and found.configs == chosen.configs and found.plan is chosen.plan


def test_ctrl_c_while_it_is_refined_keeps_what_the_networks_told(tmp_path):
    """The pair of 1x1 and depthwise, and second configurations, which only the network shows to be faster."""

    class Stopping(Networks):
        def rehearse(self, programs, rounds=5, runs=12):
            if self.asked == 1:
                raise KeyboardInterrupt
            return super().rehearse(programs)

    def seconds(operator, tile):
        return (1.5 if operator == FUSED[EXPAND, DEPTHWISE] else float(len(getattr(operator, "convs", "1")))) / tile

    found = rehearse(GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), Stopping(seconds))
    assert found is not None and found.interrupted
    assert [type(group.operator) for group in found.plan.groups] == [FusedConvs, Conv2d] * 2
    assert all(found.configs[group.operator] == {"tile": 2} for group in found.plan.groups)
    again = rehearse(GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), Networks(seconds))
    assert again is not None and not again.interrupted


def test_a_failing_variant_is_left_out(tmp_path):
    class Failing(Networks):
        def rehearse(self, programs, rounds=5, runs=12):
            outcomes = super().rehearse(programs)
            failed = MeasureOutcome(None, "crash", "boom")
            tiles = [{step.candidate[1]["tile"] for step in program} for program in programs]
            return [failed if 2 in tile else o for o, tile in zip(outcomes, tiles, strict=True)]

    found = rehearse(
        GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), Failing(lambda op, tile: 1.0 / tile)
    )
    assert found is not None and set(map(str, found.configs.values())) == {"{'tile': 1}"}
    nothing = Failing(lambda op, tile: 1.0)
    only = {operator: [{"tile": 2}] for operator in OPERATORS}
    assert rehearse(GRAPH, SITES, only, first(2), RehearsalStore(tmp_path / "b", CPU), nothing) is None


def test_a_second_rehearsal_is_read_and_a_damaged_line_measured_again(tmp_path):
    runner = Networks(lambda operator, tile: 1.0 / tile)
    rehearse(GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), runner)
    asked = runner.asked
    again = rehearse(GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), runner)
    assert runner.asked == asked and again is not None
    lines = (tmp_path / FILE).read_text().splitlines()
    (tmp_path / FILE).write_text("\n".join([lines[0][:40], *lines[1:]]) + "\n")
    rehearse(GRAPH, SITES, TWO_EACH, first(), RehearsalStore(tmp_path, CPU), runner)
    assert runner.asked == asked + 1


def test_networks_take_turns_for_some_seconds():
    assert rounds(TURNS_SECONDS / RUNS / 7.5) == 7
    assert rounds(TURNS_SECONDS) == LEAST_ROUNDS and rounds(1e-9) == rounds(0.0) == MOST_ROUNDS
    assert runs(1e-9) == runs(0.0) == runs(TURNS_SECONDS / RUNS / 7.5) == RUNS
    assert runs(TURNS_SECONDS / LEAST_ROUNDS / 5) == 5 and runs(TURNS_SECONDS) == LEAST_RUNS


def test_a_rehearsal_of_kernels_of_which_none_was_measured_finds_nothing(tmp_path):
    """On a busy machine a short budget may be over before the first measurement."""
    runner = Networks(lambda operator, tile: 1.0 / tile)
    assert rehearse(GRAPH, SITES, {}, first(), RehearsalStore(tmp_path, CPU), runner) is None
    assert runner.asked == 0


def test_a_rehearsal_is_not_begun_that_would_end_too_late(tmp_path):
    """A network of 2 s runs three times in three rounds, beside three at the end."""
    runner = Networks(lambda operator, tile: 1.0 / tile)
    for seconds, asked in ((30.0, 0), (600.0, True)):
        store = RehearsalStore(tmp_path, CPU, network_seconds=2.0, end=time.monotonic() + seconds)
        assert (rehearse(GRAPH, SITES, TWO_EACH, first(), store, runner) is None) == (not asked)
        assert bool(runner.asked) == bool(asked)


def test_in_little_time_the_fusions_are_tried_with_one_configuration_of_each_kernel(tmp_path, monkeypatch):
    """Each network takes 0.1 s, five rounds of a few runs; all eight need more than there is, four do not."""
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: 0.0)
    runner = Networks(lambda operator, tile: 0.5 if operator in FUSED.values() else 1.0)

    def depths(seconds: float) -> set[int]:
        store = RehearsalStore(tmp_path, CPU, network_seconds=0.1, end=seconds)
        return {len(configs) for configs in affordable_pool(GRAPH, SITES, TWO_EACH, store.affordable).values()}

    assert depths(600.0) == {2} and depths(15.0) == {1}
    store = RehearsalStore(tmp_path, CPU, network_seconds=0.1, end=15.0)
    pool = affordable_pool(GRAPH, SITES, TWO_EACH, store.affordable)
    found = rehearse(GRAPH, SITES, pool, first(), store, runner)
    assert found is not None and all(group.is_fused for group in found.plan.groups)
    assert found.total == 1.0


def test_networks_take_turns_for_less_where_little_time_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(rehearsal.time, "monotonic", lambda: 0.0)
    asked = []

    class Counting(Networks):
        def rehearse(self, programs, rounds=5, runs=12):
            asked.append(rounds)
            return super().rehearse(programs, rounds, runs)

    for number, end in enumerate((600.0, 8.0)):
        store = RehearsalStore(tmp_path / str(number), CPU, network_seconds=0.02, end=end)
        store.outcomes([first(), first(2)], Counting(lambda operator, tile: 1.0))
    assert asked[0] == rounds(0.04) > asked[1] == rounds(0.04, rehearsal.TURNS_SHARE * 8.0)


def test_kernels_that_must_be_compiled_first_take_their_time(tmp_path):
    """As in a second run, whose worker has compiled none of those that the records know."""
    end = time.monotonic() + 60.0
    fresh = RehearsalStore(tmp_path, CPU, end=end, compilation=lambda candidates: 5.0 * len(candidates))
    assert not fresh.affordable([first(), first(2)])  # twelve kernels
    assert RehearsalStore(tmp_path, CPU, end=end).affordable([first(), first(2)])
