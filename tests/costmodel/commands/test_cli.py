from __future__ import annotations

import json

import pytest

import costmodel.commands.cli
from costmodel.commands.cli import main
from costmodel.machines.machine_file import load_machine, machine_record


def run(capsys, *arguments):
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_machines_lists_names(capsys):
    status, out, _ = run(capsys, "machines")
    assert status == 0 and "toy" in out


def test_text_and_json_come_from_the_same_record(capsys):
    status, out, _ = run(capsys, "machines", "toy", "--json")
    record = json.loads(out)
    assert status == 0
    assert record["compute"]["float32"]["sustained"] == {"1": "100 FLOP/s", "2": "200 FLOP/s"}
    _, text, _ = run(capsys, "machines", "toy")
    for value in ("100 FLOP/s", "200 FLOP/s", "L1 read (1000 B per core)", "10 B/s", "invented for mental arithmetic"):
        assert value in text
    _, listing, _ = run(capsys, "machines", "--json")
    assert "toy" in {each["name"] for each in json.loads(listing)["machines"]}


def test_a_malformed_file_does_not_hide_the_others(capsys, user_machines):
    user_machines.mkdir()
    (user_machines / "broken.yaml").write_text("name: 3\n")
    status, out, _ = run(capsys, "machines")
    assert status == 0 and "toy" in out and "not usable" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("machines", "tyo"), "did you mean toy"),
        (("machines", "no/such.yaml"), "cannot be read"),
        (("calibrate", "--threads", "100000"), "this process may use"),
        (("calibrate", "-o", "."), "is a directory"),
    ],
)
def test_user_errors_are_one_line_and_status_2(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_usage_errors_are_status_2(capsys):
    status, _, err = run(capsys, "machines", "--nope")
    assert status == 2 and "--nope" in err


def test_calibrate_writes_the_host_machine(capsys, monkeypatch, user_machines, toy):
    asked = []

    def measured(threads, effort, progress):
        asked.append((threads, effort))
        progress("step")
        return toy

    monkeypatch.setattr(costmodel.commands.cli, "calibrate", measured)
    status, out, err = run(capsys, "calibrate", "--threads", "2", "--json")
    assert status == 0 and asked == [(2, costmodel.commands.cli.CalibrationEffort())]
    assert load_machine("host") == toy
    assert {**machine_record(toy)}["memory"] == [
        {**level, "bandwidth": {int(count): rate for count, rate in level["bandwidth"].items()}}
        for level in json.loads(out)["memory"]
    ]
    assert "step" in err and str(user_machines / "host.yaml") in err


def test_calibrate_writes_where_it_is_told(capsys, monkeypatch, tmp_path, toy):
    monkeypatch.setattr(costmodel.commands.cli, "calibrate", lambda threads, effort, progress: toy)
    status, out, _ = run(capsys, "calibrate", "--quick", "-o", str(tmp_path / "deep" / "m.yaml"))
    assert status == 0 and "float32 rate" in out
    assert load_machine(tmp_path / "deep" / "m.yaml") == toy


def test_an_unwritable_place_is_found_before_measuring(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(costmodel.commands.cli, "calibrate", lambda *arguments: pytest.fail("measured first"))
    (tmp_path / "plain").write_text("")
    status, _, err = run(capsys, "calibrate", "-o", str(tmp_path / "plain" / "m.yaml"))
    assert status == 2 and "cannot be written" in err


def test_ctrl_c_while_measuring_is_status_130_and_writes_nothing(capsys, monkeypatch, tmp_path):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(costmodel.commands.cli, "calibrate", stopped)
    assert run(capsys, "calibrate", "-o", str(tmp_path / "m.yaml")) == (130, "", "stopped\n")
    assert list(tmp_path.glob("*.yaml")) == []
