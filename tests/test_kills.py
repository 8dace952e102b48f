"""Long commands that are killed at a random moment or meet a full disk, and then go on: `make thorough`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_public_api import write_model

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}
SWEEP = "-m e2e sweep --model config.json --gpu h100-sxm --gpus 4 --sequence-length 64 --workers 1 -o out --json"
TUNE = "-m fusion tune model.onnx -o out --trials 4 --threads 1 --machine xeon-amx-2c --no-report"
PREDICT = "-m e2e predict --model-config config.json --gpu t4 --sequence-length 64 --report report.html"
pytestmark = pytest.mark.thorough


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGURATION))
    return tmp_path


def start(words: str, folder: Path) -> subprocess.Popen[str]:
    """A process in ``folder`` that leads a group of its own."""
    return subprocess.Popen(
        [sys.executable, *words.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def lines_of(path: Path) -> list[str]:
    """Whole lines of a file that lines are appended to."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def kill_and_go_on(words: str, folder: Path, file: str) -> list[str]:
    """Kills the command after its first lines in ``file``, runs it again to its end, and returns the file's lines."""
    path, process = folder / file, start(words, folder)
    while process.poll() is None and not lines_of(path):
        time.sleep(0.02)
    time.sleep(random.uniform(0.0, 1.0))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    finished = lines_of(path)
    again = start(words, folder)
    _, errors = again.communicate(timeout=600)
    assert again.returncode == 0, errors
    assert finished and lines_of(path)[: len(finished)] == finished
    assert not [left for left in folder.rglob("*") if left.name.startswith((".unfinished", "tmp"))]
    return lines_of(path)


def test_a_killed_sweep_goes_on(folder: Path):
    pytest.importorskip("transformers")
    keys = [json.loads(line)["key"] for line in kill_and_go_on(SWEEP, folder, "out/results.jsonl")]
    assert len(set(keys)) == len(keys) > 2


def test_a_killed_tuning_goes_on(folder: Path):
    pytest.importorskip("onnxruntime")
    write_model(folder / "model.onnx")
    assert kill_and_go_on(TUNE, folder, "out/records/database_tuning_record.json")
    assert (folder / "out" / "manifest.json").is_file()


def test_a_full_disk_is_named(folder: Path):
    disk = folder / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("no disk can be mounted")
    try:
        (disk / "config.json").write_text(json.dumps(CONFIGURATION))
        process = start(PREDICT, disk)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 2 and "No space left on device" in errors and "Traceback" not in errors, errors
        assert [path.name for path in disk.iterdir()] == ["config.json"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
