"""Recorded job: profiles of its ranks, paired and linked with the execution traces of the same processes; the ranks and
groups of execution traces; the machine file of the GPU that a profile names.

A recorded ``c10d`` call names its group only in ``record_param_comms`` inside it: by name and size in later schemas, by
an address without meaning on other ranks in the first one. There, groups are identified by the order of their first
use, and a group is the whole job if a call splits its data over as many ranks as there are traces.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.machines.machine_file import driver_names, load_machine, machine_files
from costmodel.machines.machine_records import Machine
from e2e.step.collective_names import kind_of, kind_of_short
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Value
from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.json_stream import archive_members
from e2e.traces.kineto import KinetoTrace, read_kineto
from e2e.traces.linked_trace import LinkedTrace, link

_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_WILD = frozenset("*?[")


@dataclass(frozen=True)
class RecordedRun:
    """Profiles in the order of their ranks; ``links``: rank -> its profile linked with its execution trace."""

    profiles: tuple[KinetoTrace, ...]
    links: Mapping[int, LinkedTrace]

    @property
    def gpu(self) -> str:
        """Name of the GPUs given by the driver."""
        return self.profiles[0].gpu


def expand_files(values: Sequence[Path | str]) -> list[Path]:
    """Expand paths, patterns (``"rank*.json.gz"``) and archives with several traces to files, without repetition.

    Raises ``InputError`` for a pattern without matches.
    """
    found: dict[Path, None] = {}
    for value in values:
        text = str(value)
        paths = [Path(text)]
        if _WILD & set(text) and not Path(text).exists():
            paths = [Path(name) for name in sorted(glob.glob(text))]
            if not paths:
                raise InputError(f"{text}: no file fits this pattern; check the path")
        for path in paths:
            found.update(dict.fromkeys(_members(path)))
    return list(found)


def _members(path: Path) -> list[Path]:
    if path.is_file() and path.name.endswith(_ARCHIVES):
        return [path / name for name in archive_members(path)]
    return [path]


def read_recorded_run(kineto: Sequence[Path | str], traces: Sequence[Path | str] = ()) -> RecordedRun:
    """Read all files and link every profile with the execution trace of its process, if ``traces`` are given.

    Raises ``InputError`` if two profiles are of one rank, ranks or their traces are missing, or the GPUs differ.
    """
    profiles = sorted((read_kineto(path) for path in expand_files(kineto)), key=lambda profile: profile.rank)
    _check(profiles)
    links: dict[int, LinkedTrace] = {}
    left = [read_execution_trace(path) for path in expand_files(traces)]
    if left and len(left) != len(profiles):
        raise InputError(
            f"{len(left)} execution traces and {len(profiles)} profiles; give --trace and --kineto of the same ranks"
        )
    for profile in profiles if left else ():
        linked = _partner(profile, left)
        links[profile.rank] = linked
        left.remove(linked.trace)
    return RecordedRun(tuple(profiles), links)


def _check(profiles: Sequence[KinetoTrace]) -> None:
    by_rank: dict[int, KinetoTrace] = {}
    for profile in profiles:
        other = by_rank.setdefault(profile.rank, profile)
        if other is not profile:
            raise InputError(f"{other.source} and {profile.source} are both of rank {profile.rank}; give one of them")
        if profile.gpu != profiles[0].gpu:
            raise InputError(
                f"{profiles[0].source} was recorded on {profiles[0].gpu}, {profile.source} on {profile.gpu}; "
                "give ranks of one kind of GPU"
            )
    world = max((profile.world_size for profile in profiles), default=1)
    missing = sorted(set(range(world)) - by_rank.keys())
    if len(profiles) > 1 and missing:
        ranks = ", ".join(str(rank) for rank in missing[:8])
        raise InputError(
            f"{profiles[0].source}: the job has {world} ranks, but there is no profile of rank {ranks}; give them all"
        )


def _partner(profile: KinetoTrace, traces: Sequence[OperatorTrace]) -> LinkedTrace:
    """Link with the first trace of the same process or, without process ids, with the first one that fits."""
    same = [trace for trace in traces if trace.pid == profile.pid and trace.pid]
    if not same and len(traces) > 1:
        same = [trace for trace in traces if not (trace.pid and profile.pid)]
    reason: InputError | None = None
    for trace in same or traces[:1]:
        try:
            return link(trace, profile)
        except InputError as error:
            reason = reason or error
    raise reason or InputError(f"{profile.source}: no execution trace of its process; give --trace of every rank")


DETAILS = "record_param_comms"
# Positions in its inputs: after tensors and sequence number the group, the rank in it and the collective; splits of
# uneven exchanges. A wait has no tensors, so all are one position earlier.
GROUP, RANK, NAME, SPLITS = 2, 3, 4, (5, 6)
# In other collectives the rank's position holds the root, or the peer.
SYMMETRIC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def ranks_of_job(traces: Sequence[OperatorTrace]) -> tuple[OperatorTrace, ...]:
    """Return ``traces`` in the order of their ranks, each with the groups of its collectives.

    Raises ``InputError`` for two traces of one rank, and if a rank has none.
    """
    found = sorted((with_groups(trace, len(traces)) for trace in traces), key=lambda trace: trace.rank)
    repeated = [rank for rank, count in Counter(trace.rank for trace in found).items() if count > 1]
    if repeated:
        names = ", ".join(trace.source for trace in found if trace.rank in repeated)
        raise InputError(f"{names}: give one trace of every rank")
    world = max(trace.world_size for trace in found)
    missing = sorted(set(range(world)) - {trace.rank for trace in found})
    if missing:
        ranks = ", ".join(str(rank) for rank in missing[:8])
        raise InputError(
            f"{found[0].source}: the job has {world} ranks, but there is no trace of rank {ranks}; give them all"
        )
    return tuple(found)


def with_groups(trace: OperatorTrace, ranks: int = 1) -> OperatorTrace:
    """Return ``trace`` with its rank, its world size (at least ``ranks``) and the group of every collective."""
    reader = _Groups(trace)
    calls = tuple(reader.named(call) for call in trace.calls)
    world = max([ranks, trace.world_size, *reader.sizes.values()])
    groups = {
        name: trace.process_groups.get(name) or tuple(range(world))
        for name in reader.sizes
        if name in trace.process_groups or reader.sizes[name] in (0, world)
    }
    unknown = sorted(reader.sizes.keys() - groups.keys())
    if unknown:
        raise InputError(
            f"{trace.source}: group {unknown[0]!r} has {reader.sizes[unknown[0]]} of {world} ranks, but the trace does "
            "not tell which; record it with PyTorch 2.2 or newer"
        )
    rank = _rank(trace)
    return replace(trace, calls=calls, rank=rank, world_size=world, process_groups={**trace.process_groups, **groups})


@dataclass
class _Groups:
    """Names of the process groups. ``sizes``: group -> number of ranks, 0 if unknown."""

    trace: OperatorTrace
    sizes: dict[str, int] = field(default_factory=dict)
    _names: dict[Value, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._details = {call.parent: call for call in self.trace.calls if call.name == DETAILS}

    def named(self, call: OperatorCall) -> OperatorCall:
        """Return a collective with its group among the attributes; other calls are unchanged."""
        details = self._details.get(call.id)
        if details is None or kind_of(call.name) is None:
            return call
        name = self._name(details)
        self.sizes[name] = max(self.sizes.get(name, 0), _size(details))
        return replace(call, attributes={**call.attributes, "process_group": name})

    def _name(self, details: OperatorCall) -> str:
        told = details.attributes.get("pg_name")
        if isinstance(told, str) and told:
            return told
        key = details.inputs[GROUP] if len(details.inputs) > GROUP else None
        if isinstance(key, tuple) and key and isinstance(key[0], str):
            return key[0]
        return self._names.setdefault(key, f"group {len(self._names)}")


def _size(details: OperatorCall) -> int:
    told = details.attributes.get("pg_size")
    if isinstance(told, int):
        return told
    splits = [details.inputs[place] for place in SPLITS if place < len(details.inputs)]
    return max((len(split) for split in splits if isinstance(split, tuple)), default=0)


def _rank(trace: OperatorTrace) -> int:
    """Rank of a trace: its place in groups of known ranks.

    Else named by a wait; else inferred from the tensors' devices.
    """
    details = [call.inputs for call in trace.calls if call.name == DETAILS]
    told = Counter(_places(details, trace)) or Counter(_waiting(details))
    return told.most_common(1)[0][0] if told else trace.rank


def _places(details: Iterable[tuple[Value, ...]], trace: OperatorTrace) -> Iterable[int]:
    for inputs in details:
        if len(inputs) <= NAME or kind_of_short(str(inputs[NAME])) not in SYMMETRIC:
            continue
        group, place = inputs[GROUP], inputs[RANK]
        ranks = trace.process_groups.get(str(group[0]), ()) if isinstance(group, tuple) and group else ()
        if isinstance(place, int) and 0 <= place < len(ranks):
            yield ranks[place]


def _waiting(details: Iterable[tuple[Value, ...]]) -> Iterable[int]:
    for inputs in details:
        if len(inputs) > RANK and inputs[NAME - 1] == "wait":
            rank = inputs[RANK - 1]
            if isinstance(rank, int):
                yield rank


# Equivalent form factors in drivers' names and in ours: SXM2, SXM4, SXM5 are one; HBM3 is only sold as SXM.
_SAME = ((re.compile(r"^sxm\d*$|^hbm3e?$"), "sxm"), (re.compile(r"^(\d+)gb$"), r"\1gb"))

_MEMORY = re.compile(r"^\d+gb$")
# Words that denote another card: other multiprocessors, clocks or memory.
_OTHER_CARD = frozenset({"ti", "super", "d", "laptop", "mobile", "max", "q", "nvl"})


def machine_of_gpu(name: str) -> Machine | None:
    """Return the machine for ``name`` ("Tesla V100-SXM2-32GB", or a part number), ``None`` if none or several fit."""
    known = driver_names().get(name.lower())
    if known is not None:
        return load_machine(known)
    words = _words(name)
    fitting: list[tuple[int, str]] = []
    for stem in machine_files():
        tokens = _words(stem)
        if tokens <= words and words & _OTHER_CARD <= tokens:
            fitting.append((len(tokens), stem))
    if not fitting:
        # A name without form factor ("NVIDIA H200") suffices if only one card of this chip is known; a name with an
        # unknown form factor, if all cards of the chip with its memory are of one kind.
        cards = [stem for stem in machine_files() if re.split(r"[-_ ]+", stem)[0] in words]
        told = {word for word in words if _MEMORY.match(word)}
        cards = [stem for stem in cards if told <= _words(stem)] or cards
        cards = [stem for stem in cards if not any(stem.startswith(f"{other}-") for other in cards)]  # variants
        if "dgxs" in words:  # DGX Stations: cards with NVLink at the rates of modules
            cards = [stem for stem in cards if "sxm" in _words(stem)]
        if len(cards) != 1:
            return None
        fitting = [(1, cards[0])]
    machine = load_machine(max(fitting)[1])
    return machine if machine.kind == "gpu" else None


def recorded_machine(name: str, source: str) -> Machine:
    """Return :func:`machine_of_gpu`; if there is none, raise ``InputError`` that asks for ``--gpu``."""
    machine = machine_of_gpu(name)
    if machine is None:
        raise InputError(f"{source}: recorded on {name or 'an unknown GPU'}, which no machine file fits; give --gpu")
    return machine


def _words(text: str) -> frozenset[str]:
    words = set()
    for word in re.split(r"[-_ ]+", text.lower()):
        for pattern, same in _SAME:
            word = pattern.sub(same, word)
        words.add(word)
    return frozenset(words - {""})
