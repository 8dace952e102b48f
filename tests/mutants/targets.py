"""Which modules are damaged, and by which tests the damage should be seen.

The first failure ends a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")


def _below(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


# The first failure ends a run, so those that draw many graphs come last.
_SIMULATOR = _below(
    "e2e/simulate",
    *("instructions", "device_streams", "timeline_nodes", "timeline", "rendezvous", "simulator", "simulator_errors"),
    *("steady_state", "sharing_limits", "agreement", "skew", "link_sharing", "contention", "simulator_properties"),
)
_PRICING = _below(
    "e2e/price",
    *("pricing", "priced_work", "collective_pricing", "collective_durations", "contention_loads", "kernel_loads"),
)
# Those that see most of a module's faults, where they are not the file of its name.
_FIRST = {
    "e2e/simulate/simulator.py": ("timeline_nodes", "simulator", "steady_state"),
    "e2e/simulate/host_threads.py": ("timeline_nodes", "simulator"),
    "e2e/simulate/timeline_builder.py": ("timeline_nodes", "simulator"),
    "e2e/simulate/timeline.py": ("timeline_nodes", "timeline"),
    "e2e/simulate/rendezvous.py": ("agreement", "rendezvous"),
    "e2e/simulate/link_sharing.py": ("sharing_limits",),
}
_SELECTION = _below("fusion/model", "covers", "selection")
_ANALYZER = _below("fusion/analysis", "reasons", "analyzer", "network_analysis")

# Tests that start commands, which import a module as it is on disk.
ELSEWHERE = ("tests/e2e/simulate/test_simulator.py::test_the_benchmark_counts_what_it_simulates",)

# What a figure of the robustness page is told for -> its modules -> their tests.
GROUPS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "simulator": {
        f"e2e/simulate/{name}.py": _SIMULATOR
        for name in (
            "simulator",
            "host_threads",
            "device_streams",
            "link_sharing",
            "rendezvous",
            "instructions",
            "timeline_builder",
            "timeline",
        )
    },
    "pricing": {f"e2e/price/{name}.py": _PRICING for name in ("pricing", "collective_pricing", "contention")},
    "selection": {"fusion/model/selection.py": _SELECTION},
    "analyzer": {f"fusion/analysis/{name}.py": _ANALYZER for name in ("analyzer", "reasons")},
}


def all_targets() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(group, module's file, test files), all relative to the project's root."""
    for group, modules in GROUPS.items():
        for module, tests in modules.items():
            yield group, module, tests


def first_tests(module: str, tests: tuple[str, ...]) -> tuple[str, ...]:
    """Of the ``tests`` of ``module`` those that are worth a run of their own before the others; all if none is."""
    folder, name = module.rsplit("/", 1)
    wanted = _below(folder, *_FIRST.get(module, (name.removesuffix(".py"),)))
    return tuple(test for test in wanted if test in tests) or tests


def module_name(file: str) -> str:
    """``a.b`` of ``a/b.py``."""
    return file.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class EquivalentMutant:
    """A fault that nobody can see, by the lines that it changes, and why."""

    module: str
    before: str
    after: str
    why: str


def equivalent_mutants(file: Path = EQUIVALENT) -> list[EquivalentMutant]:
    """All that a person has looked at and found to be none."""
    document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    return [
        EquivalentMutant(module, entry["before"].strip(), entry["after"].strip(), entry["why"])
        for module, entries in document.items()
        for entry in entries
    ]
