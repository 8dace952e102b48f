"""A package outside of this project adds a kernel template and an engine: an entry point, and the calls that we use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tvm")
from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.operators.layers import Pool2d
from fusion.comparing import engine
from fusion.comparing.engine import EngineSpec, select_engines
from schedules.contract.cpu_target import host_target
from schedules.contract.template import load_extensions
from schedules.kernels import template_table
from schedules.kernels.template_table import template_for
from schedules.measuring.measure_runner import Runner

MODULE = """
from fusion.comparing.engine import EngineSpec
from fusion.comparing.engine import register as register_engine
from schedules.kernels.pool_kernel import Pool
from schedules.kernels.template_table import register as register_template


class ToyPool(Pool):
    family = "toy-pool"

    def space(self, operator, cpu):
        return [{"toy": 1}]

    def build(self, operator, config, cpu):
        assert config == {"toy": 1}
        return super().build(operator, super().space(operator, cpu)[0], cpu)


class ToyEngine:
    def prepare(self, workload, progress):
        raise NotImplementedError


register_template(ToyPool())
register_engine(EngineSpec("toy-engine", "toy_extension:ToyEngine", ("toy_runtime",)))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install ``toy_extension`` for this test; its module may be written again before it is loaded."""
    info = tmp_path / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fusion.extensions]\ntoy = toy_extension\n")
    (tmp_path / "toy_extension.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(engine, "ENGINES", dict(engine.ENGINES))
    monkeypatch.setattr(template_table, "TEMPLATES", list(template_table.TEMPLATES))
    monkeypatch.delitem(sys.modules, "toy_extension", raising=False)
    load_extensions.cache_clear()
    yield tmp_path
    load_extensions.cache_clear()


def test_a_template_and_an_engine_are_registered_from_outside(package: Path):
    cpu = host_target(1)
    operator = Pool2d("max", 1, 16, 6, 6, (3, 3))
    template = template_for(operator, cpu)
    assert template is not None and template.family == "toy-pool"
    with Runner(cpu) as runner:  # the measuring process finds it too
        outcome = runner.measure(operator, template.space(operator, cpu)[0])
    assert outcome.ok, outcome
    spec = select_engines(["toy-engine"])[1]
    assert spec == EngineSpec("toy-engine", "toy_extension:ToyEngine", ("toy_runtime",))
    assert spec.missing() == "toy_runtime not installed: pip install toy_runtime"
    with pytest.raises(InputError, match="no such engine; there are .*, toy-engine"):
        select_engines(["another"])


def test_an_extension_that_cannot_be_imported_is_named(package: Path):
    (package / "toy_extension.py").write_text("import toy_runtime\n")
    with pytest.raises(MissingDependencyError, match="toy: its fusion.extensions toy_extension cannot be imported"):
        select_engines([])
