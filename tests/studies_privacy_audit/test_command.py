"""The command prints and saves the same results."""

import json

from studies.privacy_audit import run_command


def test_the_printed_json_is_what_is_saved(tmp_path, capsys):
    out = tmp_path / "leaks.json"

    run_command(is_quick=True, out=out, seed=0, as_json=True, only=["dense", "signs"])

    printed, progress = capsys.readouterr()
    assert printed == out.read_text()
    assert list(json.loads(printed)["attacks"]) == ["dense", "signs"]
    assert progress == ""  # none without a terminal


def test_the_table_is_printed_without_json(capsys):
    run_command(is_quick=True, out=None, seed=0, as_json=False, only=["signs"])

    assert "Labels, %" in capsys.readouterr().out
