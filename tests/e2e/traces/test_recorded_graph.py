"""Recorded iterations as graphs: what is conserved, what is waiting, which dependencies are seen; replayed, by hand
and real: scheduling error alone, because every duration is the measured one.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import Await, HostWork, Launch, RankGraph, RecordEvent, Signal, StreamWait, Synchronize
from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.kineto import read_kineto
from e2e.traces.launches import device_works
from e2e.traces.linked_trace import link
from e2e.traces.recorded_graph import RecordedStep, recorded_graph, recorded_ranks
from e2e.traces.step_window import iterations
from tests.e2e.recorded_traces import AUTOGRAD, LINEAR, LINEAR_ET, RESNET_A100, RESNET_V100, Profile, recorded

US = 1e-6


def record(profile: Profile, tmp_path: Path, step: int | str | None = None) -> RecordedStep:
    return recorded_graph(read_kineto(profile.write(tmp_path / "k.json")), step=step)


def us(seconds: float) -> float:
    return round(seconds / US, 6)


def host(graph: RankGraph, thread: str = "main") -> list[tuple[str, float]]:
    """(kind or action, microseconds) of a thread."""
    rows = []
    for action in graph.threads[thread]:
        name = action.kind if isinstance(action, HostWork) else type(action).__name__
        duration = getattr(action, "duration", None)
        rows.append((name, us(duration.seconds) if duration else 0.0))
    return rows


def test_pieces_of_operators_and_gaps(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("aten::mm", 0, 50)
    profile.launch(10, 5, 20, 100)
    profile.launch(30, 6, 120, 10)
    profile.operator("aten::view", 60, 4)
    profile.operator("aten::add", 70, 10)
    profile.launch(72, 3, 130, 1)
    step = record(profile, tmp_path)
    graph = step.graph.ranks[0]
    # The whole trace ends with the last kernel, at 131.
    assert host(graph)[:-1] == [
        ("T2", 10),
        ("Launch", 5),
        ("T5", 15),
        ("Launch", 6),
        ("T3", 14),
        ("T1", 10),
        ("T5", 4),
        ("T1", 6),
        ("T2", 2),
        ("Launch", 3),
        ("T3", 5),
    ]
    names = [graph.calls[a.call].name for a in graph.threads["main"] if isinstance(a, HostWork) and a.call is not None]
    assert names == ["aten::mm"] * 3 + ["aten::view"] * 2 + ["aten::add"] * 3
    assert [us(task.duration.seconds) for task in graph.tasks if task.duration] == [100, 10, 1]
    assert graph.calls[graph.tasks[2].call or 0].name == "aten::add"
    assert us(simulate(step.graph).step_seconds) == pytest.approx(131, abs=0.01)


def test_a_synchronising_call_keeps_only_its_own_cost(tmp_path: Path) -> None:
    profile = Profile()
    profile.launch(0, 5, 5, 95)
    profile.runtime("cudaDeviceSynchronize", 10, 93)
    step = record(profile, tmp_path)
    assert host(step.graph.ranks[0]) == [("Launch", 5), ("T1", 5), ("Synchronize", 3)]
    assert us(step.removed.synchronization) == 90
    assert us(simulate(step.graph).step_seconds) == pytest.approx(103, abs=0.01)


def test_the_awaited_stream_is_the_one_that_ended_in_time(tmp_path: Path) -> None:
    """Stream 9 still runs when the call returns, so it was not awaited."""
    profile = Profile()
    profile.launch(0, 5, 5, 50, stream=7)
    profile.launch(6, 4, 10, 500, stream=9)
    profile.runtime("cudaStreamSynchronize", 12, 45)
    synchronize = next(a for a in record(profile, tmp_path).graph.ranks[0].actions() if isinstance(a, Synchronize))
    assert synchronize.stream == 7
    assert us(synchronize.duration.seconds) == 2  # type: ignore[union-attr]


def test_the_main_thread_waits_for_autograd(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("aten::mm", 0, 10)
    profile.operator("autograd::engine::evaluate_function: MmBackward0", 30, 40, thread=AUTOGRAD)
    profile.launch(40, 5, 50, 8, thread=AUTOGRAD)
    # The main thread goes on 2 us before the helper has left its operator.
    profile.operator("aten::add", 68, 12)
    step = record(profile, tmp_path)
    graph = step.graph.ranks[0]
    assert host(graph) == [("T5", 10), ("T1", 20), ("Signal", 0), ("Await", 0), ("T5", 12)]
    assert host(graph, "autograd") == [
        ("Await", 0),
        ("T2", 10),
        ("Launch", 5),
        ("T3", 23),
        ("Signal", 0),
        ("T3", 2),
    ]
    assert us(step.removed.other_thread) == 38
    assert us(simulate(step.graph).step_seconds) == pytest.approx(80, abs=0.01)


def test_a_thread_that_works_alongside_is_not_awaited(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("aten::mm", 0, 10)
    profile.operator("aten::cat", 20, 50, thread=AUTOGRAD)
    for start in range(15, 80, 10):
        profile.operator("aten::add", start, 8)
    profile.launch(81, 2, 84, 1)
    graph = record(profile, tmp_path).graph.ranks[0]
    kinds = Counter(type(action).__name__ for action in graph.threads["main"])
    assert (kinds["Signal"], kinds["Await"]) == (1, 0)
    assert [name for name, _ in host(graph, f"thread {AUTOGRAD}")][0] == "Await"


def test_waiting_of_a_blocking_copy_is_not_host_work(tmp_path: Path) -> None:
    """A copy to pageable memory returns when it is over: at 210, after a kernel that ends at 200."""
    profile = Profile()
    profile.launch(0, 5, 5, 195)
    profile.launch(
        10, 203, 200, 10, call="cudaMemcpyAsync", name="Memcpy DtoH (Device -> Pageable)", category="gpu_memcpy"
    )
    step = record(profile, tmp_path)
    names = [name for name, _ in host(step.graph.ranks[0])]
    assert names == ["Launch", "T1", "Launch", "Synchronize"]
    assert us(simulate(step.graph).step_seconds) == pytest.approx(213, rel=0.1)


def test_launches_that_wait_for_room_in_the_queue(tmp_path: Path) -> None:
    """1,000 launches of 1 us run far ahead of kernels of 20 us; then calls take as long as a kernel."""
    profile = Profile()
    for i in range(1000):
        profile.launch(2 * i, 1, 2 + 20 * i, 20)
    for i in range(100):
        profile.launch(2000 + 20 * i, 19, 20_002 + 20 * i, 20)
    step = record(profile, tmp_path)
    late = [a.duration.seconds for a in step.graph.ranks[0].actions() if isinstance(a, Launch) and a.duration][1000:]
    assert max(late) == pytest.approx(1 * US)
    assert us(step.removed.full_queue) == pytest.approx(100 * 18)
    assert us(simulate(step.graph).step_seconds) == pytest.approx(1100 * 20 + 1, abs=2)


def two_streams(profile: Profile, second_kernel: float) -> None:
    profile.launch(0, 5, 5, 100, stream=7)
    profile.runtime("cudaStreamWaitEvent", 10, 1)
    profile.launch(12, 5, second_kernel, 10, stream=9)


def test_a_wait_without_details_is_inferred_from_what_ran_when(tmp_path: Path) -> None:
    profile = Profile()
    two_streams(profile, 106)
    step = record(profile, tmp_path)
    actions = list(step.graph.ranks[0].actions())
    assert [a for a in actions if isinstance(a, RecordEvent)] == [RecordEvent(0, 7)]
    assert [a for a in actions if isinstance(a, StreamWait)] == [StreamWait(0, 9)]
    assert us(simulate(step.graph).step_seconds) == pytest.approx(116, abs=1.01)


def test_a_dependency_that_the_recording_contradicts_is_not_believed(tmp_path: Path) -> None:
    profile = Profile()
    two_streams(profile, 20)
    assert not any(isinstance(action, StreamWait) for action in record(profile, tmp_path).graph.ranks[0].actions())


def test_a_wait_with_details_is_taken_as_told(tmp_path: Path) -> None:
    """The profiler tells that stream 9 waits for an event recorded before the second kernel on stream 7."""
    profile = Profile()
    profile.launch(0, 5, 5, 100, stream=7)
    event = profile.runtime("cudaEventRecord", 6, 1)
    profile.launch(8, 2, 105, 300, stream=7)
    wait = profile.runtime("cudaStreamWaitEvent", 11, 1)
    details = {"stream": 9, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": event}
    profile.sync("Stream Wait Event", wait, **details)
    profile.launch(13, 5, 105, 10, stream=9)
    step = record(profile, tmp_path)
    kinds = [a for a in step.graph.ranks[0].actions() if isinstance(a, RecordEvent | StreamWait | Launch)]
    assert [type(a).__name__ for a in kinds] == ["Launch", "RecordEvent", "Launch", "StreamWait", "Launch"]
    assert simulate(step.graph).step_seconds == pytest.approx(405 * US)


def test_work_without_a_recorded_launch_is_kept(tmp_path: Path) -> None:
    profile = Profile()
    profile.launch(0, 5, 6, 10)
    profile.launch(20, 5, 26, 10)
    profile.events = [e for e in profile.events if e["args"].get("correlation") != 1 or e["cat"] == "kernel"]
    profile.host("user_annotation", "ProfilerStep#0", 0, 50)
    step = record(profile, tmp_path)
    assert step.device_events == len(step.graph.ranks[0].tasks) == 2


def test_a_graph_launch_is_one_task(tmp_path: Path) -> None:
    profile = Profile()
    number = profile.launch(0, 8, 10, 5, call="cudaGraphLaunch")
    for start in (16, 22):
        args = {"correlation": number, "stream": 7, "device": 0}
        event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": start, "dur": 5, "args": args}
        profile.events.append(event)
    step = record(profile, tmp_path)
    (task,) = step.graph.ranks[0].tasks
    assert (task.kind, task.name, step.device_events) == ("graph", "cudaGraphLaunch of 3 kernels", 3)
    assert task.duration is not None
    assert us(task.duration.seconds) == 17


def test_a_profile_without_device_work_is_refused(tmp_path: Path) -> None:
    profile = Profile()
    profile.operator("aten::mm", 0, 10)
    with pytest.raises(InputError, match=r"k\.json: no device work in whole trace; record with ProfilerActivity\.CUDA"):
        record(profile, tmp_path)


def rank_profile(rank: int, kernel: float, seconds: float, kind: str = "allreduce") -> Profile:
    profile = Profile(distributedInfo={"rank": rank, "world_size": 2})
    profile.host("user_annotation", "ProfilerStep#0", 0, 60)
    profile.launch(kernel - 6, 5, kernel, seconds, stream=9, name="ncclDevKernel_AllReduce")
    profile.events[-1]["args"] |= {"Collective name": kind, "In msg nelems": 8, "Group size": 2, "dtype": "Float"}
    return profile


def test_a_collective_takes_what_it_took_on_the_last_rank(tmp_path: Path) -> None:
    """Rank 0 waits from 10 for rank 1, which arrives at 40; the transfer takes 5."""
    files = [rank_profile(0, 10, 35).write(tmp_path / "0.json"), rank_profile(1, 40, 5).write(tmp_path / "1.json")]
    step = recorded_ranks([read_kineto(file) for file in files])
    tasks = [rank.tasks[0] for rank in step.graph.ranks]
    assert [us(task.duration.seconds) for task in tasks if task.duration] == [5, 5]
    collective = tasks[0].collective
    assert collective is not None
    assert (collective.kind, collective.ranks, collective.sequence, collective.size_bytes) == (
        "all_reduce",
        (0, 1),
        0,
        32,
    )
    assert us(simulate(step.graph, step.starts).step_seconds) == pytest.approx(60, abs=0.01)


def test_one_rank_alone_keeps_the_waiting_and_folds_the_others(tmp_path: Path) -> None:
    step = record(rank_profile(0, 10, 35), tmp_path)
    assert step.graph.multiplicity == {0: 2}
    assert us(step.graph.ranks[0].tasks[0].duration.seconds) == 35  # type: ignore[union-attr]
    assert us(simulate(step.graph).step_seconds) == pytest.approx(60, abs=0.01)


def test_one_rank_of_a_group_within_the_job_stands_for_the_job(tmp_path: Path) -> None:
    profile = rank_profile(4, 10, 35)
    profile.write(tmp_path / "k.json")
    document = json.loads((tmp_path / "k.json").read_text())
    document["distributedInfo"] = {"rank": 4, "world_size": 8}
    document["traceEvents"][-1]["args"] |= {"Process Group Name": "tp", "Process Group Ranks": "[4, 5]"}
    (tmp_path / "k.json").write_text(json.dumps(document))
    step = recorded_graph(read_kineto(tmp_path / "k.json"))
    (task,) = step.graph.ranks[0].tasks
    assert task.collective is not None and task.collective.ranks == (4, 5)
    assert step.graph.multiplicity == {4: 8}
    assert us(simulate(step.graph).step_seconds) == pytest.approx(60, abs=0.01)


def test_ranks_whose_collectives_do_not_match_are_refused(tmp_path: Path) -> None:
    one = read_kineto(rank_profile(0, 10, 35).write(tmp_path / "0.json"))
    other = read_kineto(rank_profile(1, 40, 5, "allgather").write(tmp_path / "1.json"))
    with pytest.raises(InputError, match="is all_reduce on rank 0 and all_gather on rank 1"):
        recorded_ranks([one, other])
    with pytest.raises(InputError, match="two profiles of one rank"):
        recorded_ranks([one, one])
    shorter = rank_profile(1, 40, 5)
    shorter.events = [event for event in shorter.events if "nccl" not in event["name"]]
    shorter.launch(20, 5, 40, 5)
    fewer = read_kineto(shorter.write(tmp_path / "2.json"))
    with pytest.raises(InputError, match="all_reduce 0 of group 'all ranks' was recorded on rank 0, but not on rank 1"):
        recorded_ranks([one, fewer])


def steps_of_rank(rank: int, lengths: dict[int, float], step: float = 1000) -> Profile:
    """The profiler's steps of those numbers; an all-reduce at the end of each, after ``lengths`` microseconds."""
    profile = Profile(distributedInfo={"rank": rank, "world_size": 2})
    for number, length in lengths.items():
        begin = step * number
        profile.host("user_annotation", f"ProfilerStep#{number}", begin, length + 50)
        profile.launch(begin + length, 5, begin + length + 6, 10, stream=9, name="ncclDevKernel_AllReduce")
        profile.events[-1]["args"] |= {"Collective name": "allreduce", "In msg nelems": 8 * number + 8}
        profile.events[-1]["args"] |= {"Group size": 2, "dtype": "Float"}
    return profile


def test_ranks_are_taken_from_the_same_step(tmp_path: Path) -> None:
    """By the lengths of its own steps rank 0 would take step 3 and rank 1 step 2."""
    one = steps_of_rank(0, {1: 100, 2: 300, 3: 200}).write(tmp_path / "0.json")
    other = steps_of_rank(1, {1: 100, 2: 150, 3: 250, 4: 100}).write(tmp_path / "1.json")
    step = recorded_ranks([read_kineto(one), read_kineto(other)])
    sizes = [rank.tasks[0].collective.size_bytes for rank in step.graph.ranks if rank.tasks[0].collective]
    assert len(sizes) == 2 and len(set(sizes)) == 1
    assert step.window.name == "ProfilerStep#3" and max(step.starts.values()) < 1e-6


def stage_profile(rank: int, *messages: tuple[str, int, float, float], told: bool = True) -> Profile:
    """A pipeline stage of three: (send or recv, peer, begin of its kernel, microseconds) of 16 bytes each."""
    profile = Profile(distributedInfo={"rank": rank, "world_size": 3})
    profile.host("user_annotation", "ProfilerStep#0", 0, 200)
    for kind, peer, begin, seconds in messages:
        stream = 20 + 4 * peer + (kind == "send")
        profile.launch(begin - 6, 5, begin, seconds, stream=stream, name="ncclDevKernel_SendRecv")
        args = {"Collective name": kind, "Process Group Name": "pp", "Process Group Ranks": "[0, 1, 2]"}
        args |= {"In msg nelems": 4, "Out msg nelems": 4, "Group size": 3, "dtype": "Float"}
        if told:
            args["Dst Rank" if kind == "send" else "Src Rank"] = peer
        profile.events[-1]["args"] |= args
    return profile


def test_messages_of_a_recorded_pipeline_meet_in_pairs(tmp_path: Path) -> None:
    """Rank 1 waits from 10 for rank 0, which sends at 50; a message takes 5. Its own to rank 2 is no answer to that."""
    stages = [
        stage_profile(0, ("send", 1, 50, 5), ("recv", 1, 120, 25)),
        stage_profile(1, ("recv", 0, 10, 45), ("send", 2, 80, 5), ("send", 0, 140, 5)),
        stage_profile(2, ("recv", 1, 20, 65)),
    ]
    files = [stage.write(tmp_path / f"{rank}.json") for rank, stage in enumerate(stages)]
    step = recorded_ranks([read_kineto(file) for file in files])
    met = [
        [(c.kind, c.ranks, c.sequence, c.size_bytes) for task in rank.tasks if (c := task.collective)]
        for rank in step.graph.ranks
    ]
    assert met == [
        [("send", (0, 1), 0, 16), ("recv", (1, 0), 0, 16)],
        [("recv", (0, 1), 0, 16), ("send", (1, 2), 0, 16), ("send", (1, 0), 0, 16)],
        [("recv", (1, 2), 0, 16)],
    ]
    timeline = simulate(step.graph, step.starts)
    assert us(timeline.task(1, 0).end) == pytest.approx(55, abs=2)
    assert us(timeline.task(0, 1).end) == pytest.approx(145, abs=2)


def test_a_message_that_does_not_tell_its_peer_is_refused(tmp_path: Path) -> None:
    profile = stage_profile(0, ("send", 1, 50, 5), told=False)
    with pytest.raises(InputError, match=r"k\.json: a send in group 'pp' of 3 ranks does not tell its peer"):
        record(profile, tmp_path)


def test_ranks_without_a_step_in_common_are_refused(tmp_path: Path) -> None:
    one = read_kineto(steps_of_rank(0, {1: 100, 2: 100}).write(tmp_path / "0.json"))
    other = read_kineto(steps_of_rank(1, {3: 100, 4: 100}).write(tmp_path / "1.json"))
    with pytest.raises(InputError, match=r"0\.json and .*1\.json: no step is in both .*; record the same steps"):
        recorded_ranks([one, other])


def test_iterations_without_numbers_are_matched_by_time(tmp_path: Path) -> None:
    """By the lengths of its own iterations rank 0 would take its third and rank 1 its second."""
    starts = ((1000, 1900, 2400, 3000, 5000, 6000), (1000, 1500, 2500, 3000, 5000, 6000))
    profiles = []
    for rank, begins in enumerate(starts):
        profile = Profile(distributedInfo={"rank": rank, "world_size": 2})
        for number, begin in enumerate(begins):
            profile.host("user_annotation", "my step", begin, 100)
            profile.launch(begin + 20, 5, begin + 26, 10, stream=9, name="ncclDevKernel_AllReduce")
            args = {"Collective name": "allreduce", "In msg nelems": 8 * number + 8, "Group size": 2, "dtype": "Float"}
            profile.events[-1]["args"] |= args
        profiles.append(read_kineto(profile.write(tmp_path / f"{rank}.json")))
    step = recorded_ranks(profiles)
    sizes = [rank.tasks[0].collective.size_bytes for rank in step.graph.ranks if rank.tasks[0].collective]
    assert len(sizes) == 2 and len(set(sizes)) == 1


# --- real profiles ---------------------------------------------------------------------------------


def check_conserved(step: RecordedStep) -> None:
    """Every device event has a task, every task one launch; host time and what was taken out make up the window."""
    for graph in step.graph.ranks:
        launched = sorted(action.task for action in graph.actions() if isinstance(action, Launch))
        assert launched == list(range(len(graph.tasks)))
    assert sum(len(graph.tasks) for graph in step.graph.ranks) == step.device_events


def main_seconds(graph: RankGraph) -> float:
    durations = (getattr(action, "duration", None) for action in graph.threads["main"])
    return sum(duration.seconds for duration in durations if duration)


def test_real_host_bound_steps_replay_exactly() -> None:
    for name in (LINEAR, RESNET_A100):
        kineto = read_kineto(recorded(name))
        step = recorded_graph(kineto)
        check_conserved(step)
        graph = step.graph.ranks[0]
        # Each kernel begins when it did, to 50 us of a step of 20 to 220 ms.
        timeline = simulate(step.graph)
        works = [work for work in device_works(kineto) if step.window.holds(work.launched)]
        begun = [timeline.task(graph.rank, place).start + step.window.start for place in range(len(works))]
        assert begun == pytest.approx([work.start for work in works], abs=50 * US)
        waiting = step.removed.other_thread + step.removed.synchronization
        assert main_seconds(graph) + waiting == pytest.approx(step.window.seconds, abs=2e-6)
        assert simulate(step.graph).step_seconds == pytest.approx(step.span_seconds, rel=0.05)
        assert simulate_iterations(step.graph).period_seconds == pytest.approx(step.period_seconds, rel=0.05)
        flags = Counter(type(action).__name__ for action in graph.actions() if isinstance(action, Signal | Await))
        assert flags == {"Signal": 2, "Await": 2}


def test_real_device_bound_steps_replay_within_5_percent() -> None:
    """The V100 is 90 ms behind its host: launches wait for room, and the period is the device's."""
    kineto = read_kineto(recorded(RESNET_V100))
    first, steady = recorded_graph(kineto, step=0), recorded_graph(kineto, step=3)
    check_conserved(steady)
    assert first.backlog_seconds == 0
    assert simulate(first.graph).step_seconds == pytest.approx(first.span_seconds, rel=0.05)
    assert steady.backlog_seconds > 0.08
    assert steady.removed.full_queue > 0.05
    assert simulate_iterations(steady.graph).period_seconds == pytest.approx(steady.period_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz", None),
        (
            "critical_path/alexnet/benchmark_result_2869224_1695835535_trace.json.gz",
            "[param|pytorch.model.alex_net|0|0|0|measure|forward]",
        ),
        (
            "critical_path/simple_add/benchmark_result_493459_1694039959_trace.json.gz",
            "[param|pytorch.model.alex_net|0|0|0|measure|forward]",
        ),
    ],
)
def test_real_small_cases_replay_within_5_percent(name: str, step: str | None) -> None:
    recording = recorded_graph(read_kineto(recorded(name)), step=step)
    check_conserved(recording)
    assert simulate(recording.graph).step_seconds == pytest.approx(recording.span_seconds, rel=0.05)


def test_real_event_synchronisation_is_told_by_the_profiler() -> None:
    name = "critical_path/cuda_event_sync_multi_stream/event_sync_trace.json.gz"
    actions = list(recorded_graph(read_kineto(recorded(name))).graph.ranks[0].actions())
    assert [action.stream for action in actions if isinstance(action, StreamWait)] == [24]
    assert [action.stream for action in actions if isinstance(action, RecordEvent)] == [20]


def test_real_linked_tasks_carry_the_calls_of_the_execution_trace() -> None:
    kineto, trace = read_kineto(recorded(LINEAR)), read_execution_trace(recorded(LINEAR_ET))
    linked = link(trace, kineto)
    start = min(span.start for span in kineto.operators if span.id in linked.spans.values())
    place = next(i for i, window in enumerate(iterations(kineto)) if window.end > start)
    names = {call.id: call.name for call in trace.calls}
    found = 0
    for offset in (0, 1):
        if place + offset == len(iterations(kineto)):
            break
        graph = recorded_graph(kineto, linked, step=place + offset).graph.ranks[0]
        for task in graph.tasks:
            assert task.call is not None
            if task.call in names:
                found += 1
                assert graph.calls[task.call].name == names[task.call]
    assert found == linked.linked_device
