"""Fetching from a git repository that the test makes."""

from __future__ import annotations

import gzip
import json
import subprocess
from hashlib import sha256

import pytest
import yaml

from costmodel.base.errors import MissingDependencyError
from lab.data import data_folder as folder
from lab.data import manifest as sources
from lab.data.__main__ import main
from lab.data.data_folder import data_folder, user_data_directory
from lab.data.manifest import MANIFEST, fetch, read_sources, sources_named, standing

TABLE, TIMES = b"# gpus,ms\n2,1.5\n8,9.0\n4,2.5\n", b"size,ns\n1,2\n"


def git(where, *arguments):
    names = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    ran = subprocess.run(["git", "-C", str(where), *names, *arguments], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository as forges serve them (partial clones, any commit); its URL and its first commit."""
    place = tmp_path_factory.mktemp("origin")
    git(place, "init", "--quiet")
    for name in ("uploadpack.allowFilter", "uploadpack.allowAnySHA1InWant"):
        git(place, "config", name, "true")
    for name, content in (("data/table.csv", TABLE), ("data/with space [1].csv", TIMES), ("huge/unwanted", b"x" * 99)):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    git(place, "add", ".")
    git(place, "commit", "--quiet", "-m", "first")
    first = git(place, "rev-parse", "HEAD")
    (place / "data" / "table.csv").write_bytes(b"changed since\n")
    git(place, "commit", "--quiet", "-a", "-m", "second")
    return f"file://{place}", first


@pytest.fixture
def manifest(repository, tmp_path, monkeypatch):
    """Writes a manifest of the files given and makes it the project's."""

    def write(files, **dataset):
        url, commit = repository
        record = {"what": "w", "licence": "MIT", "repository": url, "commit": commit, "checked": "path", **dataset}
        path = tmp_path / "sources.yaml"
        path.write_text(yaml.safe_dump({"datasets": {"toy": {**record, "files": files}}}))
        read_sources.cache_clear()
        monkeypatch.setattr(sources, "MANIFEST", path)
        return path

    yield write
    read_sources.cache_clear()


def sha(content):
    return sha256(content).hexdigest()


FILES = {
    "toy/table.csv": {"sha256": sha(TABLE), "from": "data/table.csv"},
    "toy/deep/times.csv.gz": {"sha256": sha(TIMES), "from": "data/with space [1].csv", "how": "gzip"},
    "toy/small.csv": {
        "sha256": sha(b"# gpus,ms\n2,1.5\n4,2.5\n"),
        "from": "data/table.csv",
        "how": "rows",
        "keep": [2, 4],
    },
}


def test_files_come_from_the_commit_named_and_are_made_as_stated(manifest, tmp_path):
    manifest(FILES)
    lines: list[str] = []
    done = fetch(sources_named(()), tmp_path / "data", lines.append)
    assert (done.there, done.brought, done.failed) == (0, 3, {}) and "3 files" in lines[0]
    assert (tmp_path / "data/toy/table.csv").read_bytes() == TABLE  # not what the repository has now
    assert gzip.decompress((tmp_path / "data/toy/deep/times.csv.gz").read_bytes()) == TIMES
    root = tmp_path / "data"
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert found == set(FILES)  # neither clones nor unwanted files stay
    again = fetch(sources_named(()), tmp_path / "data", lambda line: pytest.fail("fetched again"))
    assert (again.there, again.brought) == (3, 0)


def test_a_file_with_another_content_is_not_kept(manifest, tmp_path, capsys):
    manifest({**FILES, "toy/table.csv": {"sha256": sha(b"other"), "from": "data/table.csv"}})
    assert main(["fetch", "--to", str(tmp_path / "d")]) == 2
    told = capsys.readouterr()
    assert "toy/table.csv: not what the manifest says" in told.out and "2 brought, 1 not" in told.out
    assert "error: 1 files could not be fetched" in told.err and not (tmp_path / "d/toy/table.csv").exists()


def test_what_the_repository_lacks_or_nobody_can_make_is_said(manifest, tmp_path, capsys):
    manifest({"toy/a": {"sha256": sha(b"a"), "from": "nowhere"}})
    assert main(["fetch", "toy", "--to", str(tmp_path)]) == 2
    assert "toy/a: nowhere is not in file://" in capsys.readouterr().out
    manifest({"toy/b": {"sha256": sha(b"b")}}, how="derived", made="logs, by hand")
    assert main(["fetch", "--to", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"] == {"toy/b": "not fetched: logs, by hand"}


def test_without_git_or_network_it_says_so_in_one_line(manifest, tmp_path, capsys, monkeypatch):
    manifest(FILES, repository=f"file://{tmp_path}/nobody")
    assert main(["fetch", "--to", str(tmp_path / "d")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: file://") and "cannot be reached" in error and "goes on from there" in error
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="needs git; install it"):
        fetch(sources_named(()), tmp_path / "d", lambda line: None)


def test_list_says_what_is_there_missing_and_different(manifest, tmp_path, capsys):
    manifest(FILES, reason="only seen from afar")
    (tmp_path / "toy/deep").mkdir(parents=True)
    (tmp_path / "toy/table.csv").write_bytes(b"edited")
    (tmp_path / "toy/deep/times.csv.gz").write_bytes(gzip.compress(TIMES, 1))  # another compressor's bytes
    assert main(["list", "--data", str(tmp_path), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["datasets"]
    assert (record["there"], record["missing"], record["different"]) == (1, ["toy/small.csv"], ["toy/table.csv"])
    assert main(["list", "--data", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in ("1 of 3", "path 3", "different: toy/table.csv", "only seen from afar", "data fetch"):
        assert words in text


def test_the_manifest_of_the_project_is_whole():
    known = read_sources(MANIFEST)
    files = [each for source in known for each in source.files]
    assert len({each.path for each in files}) == len(files) > 350 and all(len(each.sha256) == 64 for each in files)
    assert {each.checked for each in files} <= {"length", "path", "false"}
    for source in known:
        assert source.licence and source.what
        assert source.made or all(each.how != "derived" for each in source.files), source.name
        unchecked = any(each.checked == "false" and each.how != "derived" for each in source.files)
        assert source.reason or not unchecked, source.name


def test_the_data_beside_the_checkout_are_those_of_the_manifest():
    if not data_folder().is_dir():
        pytest.skip(f"{data_folder()}: no measurements")
    for source in read_sources(MANIFEST):
        assert not standing(source, data_folder()).different, source.name


def test_where_the_data_are_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("COSTMODEL_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(folder, "_BESIDE", tmp_path / "beside")
    assert data_folder() == user_data_directory() == tmp_path / "home/costmodel/data"
    (tmp_path / "beside").mkdir()
    assert data_folder() == tmp_path / "beside"
    user_data_directory().mkdir(parents=True)
    assert data_folder() == user_data_directory()
    monkeypatch.setenv("COSTMODEL_DATA", str(tmp_path / "told"))
    assert data_folder() == tmp_path / "told" and data_folder(tmp_path / "given") == tmp_path / "given"
