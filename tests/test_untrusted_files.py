"""Files that others wrote never decide what code is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_imports import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
# Seals what it writes, and opens only what this user sealed.
OWN_CACHE = "e2e/parallelism/capture_cache.py"
RUNS_WHAT_IT_READS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "UniqueKeyLoader", "_LOADER"}


def dangers(source: str) -> Iterator[str]:
    """What of ``source`` may run code that a file holds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] in RUNS_WHAT_IT_READS)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_WHAT_IT_READS:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {each.arg: ast.unparse(each.value) for each in node.keywords}
    if called in ("eval", "exec", "builtins.eval", "builtins.exec"):
        yield called
    elif called in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
        yield f"{called} without allow_pickle=False"
    elif called == "torch.load" and given.get("weights_only") != "True":
        yield f"{called} without weights_only=True"
    elif called in ("yaml.load", "yaml.load_all") and given.get("Loader") not in SAFE_LOADERS:
        yield f"{called} without a safe loader"
    elif called in ("yaml.unsafe_load", "yaml.full_load"):
        yield called


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_that_is_read_is_run(package: str):
    found = {
        name: sorted(here)
        for path in sorted((ROOT / package).rglob("*.py"))
        if (name := path.relative_to(ROOT).as_posix()) != OWN_CACHE
        and (here := set(dangers(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "torch.load(path)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "def f():\n    import marshal",
    ],
)
def test_dangers_are_seen(source: str):
    assert list(dangers(source))


def test_what_is_safe_is_none():
    assert not list(dangers("import json\nnp.load(p, allow_pickle=False)\nyaml.load(t, Loader=UniqueKeyLoader)"))
